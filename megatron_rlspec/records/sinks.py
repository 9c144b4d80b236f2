"""Send the records of a run to TensorBoard, and to Weights & Biases, by their own packages.

Each is a sink with `write`, `samples` and `close`, which `Recorder` in `recorder.py` calls on rank 0. `log.sinks` in a
run's options names the sinks. Their packages are optional, so a package is imported only when its sink is opened.
"""

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

# Columns of the table of samples in Weights & Biases; keys of the rows that `Recorder.samples` makes.
COLUMNS = ("step", "prompt", "response", "label", "reward", "status")


class TensorBoard:
    """Event files in `run_dir/tensorboard`.

    After a resume at `first_step`, TensorBoard hides what the run wrote before for this step and later ones.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # `first_step` 0 is a new run, which hides nothing.
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the record of a step."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add samples, as rows of `samples.jsonl`."""
        for number, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n{row['prompt']}{row['response']}"
            self._board.add_text(f"sample/{number}", text, step)

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """A run of Weights & Biases. The file `run_dir/wandb_id` has its id, so that a resumed run goes on under this id.

    The service keeps the first value of a step. So steps that a resume repeats keep their old values there.
    """

    def __init__(
        self, log: LogConfig, options: Mapping[str, Any], run_dir: Path, first_step: int
    ) -> None:
        """`options`: all options of the run, by section, for the run's page. Raises ConfigError."""
        try:
            self._package = importlib.import_module("wandb")
        except Exception as error:  # not only ImportError: its many dependencies often disagree
            raise ConfigError(
                f"log.sinks=wandb: it cannot be imported: {one_line(error)}"
            ) from None
        file = run_dir / "wandb_id"
        # A new run gets a new id, also in a directory that was used before.
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
        """Add the record of a step."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show samples, as rows of `samples.jsonl`, in a table."""
        data = [[str(row[column]) for column in COLUMNS] for row in rows]
        table = self._package.Table(columns=list(COLUMNS), data=data)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


Sink = TensorBoard | WeightsAndBiases


def check_installed(log: LogConfig) -> None:
    """Raise ConfigError if the package of a sink is not installed. A sink has the name of its package.

    It imports nothing, so it is fast. A package that is installed can still fail when its sink is opened.
    """
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
    """Open the sinks of `log.sinks`; with `first_step` above 0 they go on after a resume. Raises ConfigError.

    `run/recording.py` hands this function to `Recorder`, which calls it on rank 0 after it has dropped the lines of
    `first_step` and later from the run's files.
    """
    sinks: list[Sink] = []
    if "tensorboard" in log.sinks:
        sinks.append(TensorBoard(run_dir, first_step))
    if "wandb" in log.sinks:
        sinks.append(WeightsAndBiases(log, options, run_dir, first_step))
    return sinks
