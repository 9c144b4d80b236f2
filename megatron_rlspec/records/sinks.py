"""Other places that get the records of a run: TensorBoard and Weights & Biases, through their own packages."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rlspec import files
from megatron_rlspec.config import ConfigError, LogConfig
from megatron_rlspec.texts import one_line


class Sink(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the record of a step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in `run_dir/tensorboard`. After a resume at `first_step`, TensorBoard hides later steps."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases:
    """One run of Weights & Biases for a run directory. A resumed run goes on there, under the id in `wandb_id`.

    Weights & Biases keeps the first value of a step, so steps that a resume repeats keep their old values there.

    options  of the run, by section, which Weights & Biases shows
    """

    def __init__(
        self,
        log: LogConfig,
        options: Mapping[str, Any],
        run_dir: Path,
        first_step: int,
    ) -> None:
        try:
            import wandb
        except Exception as error:  # its many dependencies often disagree
            raise ConfigError(
                f"log.sinks=wandb: it cannot be imported: {one_line(error)}"
            ) from None
        id_file = run_dir / "wandb_id"
        is_resumed = first_step > 0 and id_file.exists()
        if not is_resumed:
            files.write(id_file, uuid.uuid4().hex)
        try:
            self._run = wandb.init(
                project=log.project or os.environ.get("WANDB_PROJECT", "megatron_rlspec"),
                name=log.name or os.environ.get("WANDB_NAME") or run_dir.resolve().name,
                id=id_file.read_text(),
                resume="allow",
                dir=str(run_dir),
                config=dict(options),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"log.sinks=wandb: {reason}; WANDB_MODE=offline writes to {run_dir}/wandb"
            ) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


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
    check(log)
    sinks: list[Sink] = []
    if "tensorboard" in log.sinks:
        sinks.append(TensorBoard(run_dir, first_step))
    if "wandb" in log.sinks:
        sinks.append(WeightsAndBiases(log, options, run_dir, first_step))
    return sinks
