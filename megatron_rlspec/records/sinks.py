"""Other places that get the records of a run: TensorBoard, and Weights & Biases, by their own packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.config import ConfigError, LogConfig
from megatron_rlspec.texts import one_line

# of the table of samples
COLUMNS = ("step", "prompt", "response", "label", "reward", "status")


class TensorBoard:
    """Event files in `run_dir/tensorboard`. After a resume at `first_step`, TensorBoard hides later steps."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the record of a step."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add samples, as rows of samples.jsonl."""
        for number, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n{row['prompt']}{row['response']}"
            self._board.add_text(f"sample/{number}", text, step)

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """A run of Weights & Biases. A resumed run goes on there; `run_dir/wandb_id` has its name.

    The first value of a step stays there, so steps that a resume repeats keep their old values.
    """

    def __init__(
        self, log: LogConfig, options: Mapping[str, Any], run_dir: Path, first_step: int
    ) -> None:
        """`options`: of the run, by section, which are shown there."""
        try:
            self._package = importlib.import_module("wandb")
        except Exception as error:  # its many dependencies often disagree
            raise ConfigError(
                f"log.sinks=wandb: it cannot be imported: {one_line(error)}"
            ) from None
        file = run_dir / "wandb_id"
        if not (first_step and file.exists()):
            files.write(file, uuid.uuid4().hex)
        try:
            self._run = self._package.init(
                project=log.project or os.environ.get("WANDB_PROJECT", "megatron_rlspec"),
                config=dict(options),
                name=log.name or os.environ.get("WANDB_NAME") or run_dir.resolve().name,
                id=file.read_text(),
                dir=str(run_dir),
                resume="allow",
            )
        except self._package.Error as error:
            raise ConfigError(
                f"log.sinks=wandb: {one_line(error)}; WANDB_MODE=offline writes to {run_dir}/wandb"
            ) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [[str(row[column]) for column in COLUMNS] for row in rows]
        table = self._package.Table(columns=list(COLUMNS), data=data)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


Sink = TensorBoard | WeightsAndBiases


def check(log: LogConfig) -> None:
    """Raise ConfigError if the package of a sink, which has its name, is not installed."""
    for name in log.sinks:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.sinks={','.join(log.sinks)}: {name} needs the package {name}, which is not installed "
                f"here: pip install {name}"
            )


def open_sinks(
    log: LogConfig,
    options: Mapping[str, Any],
    run_dir: Path,
    first_step: int,
) -> Sequence[Sink]:
    """Open the sinks of `log.sinks`. Raises ConfigError."""
    sinks: list[Sink] = []
    if "tensorboard" in log.sinks:
        sinks.append(TensorBoard(run_dir, first_step))
    if "wandb" in log.sinks:
        sinks.append(WeightsAndBiases(log, options, run_dir, first_step))
    return sinks
