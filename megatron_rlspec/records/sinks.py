"""Other places that get the records of a run: TensorBoard, Weights & Biases and trackio, by their own packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rlspec import files
from megatron_rlspec.config import ConfigError, LogConfig
from megatron_rlspec.texts import one_line

# of the table of samples
COLUMNS = ("step", "prompt", "response", "label", "reward", "status")


class Sink(Protocol):
    """Takes the numbers and some texts of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the record of a step."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add samples, as rows of samples.jsonl."""

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

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for number, row in enumerate(rows):
            text = f"reward {row['reward']}\n\n{row['prompt']}{row['response']}"
            self._board.add_text(f"sample/{number}", text, step)

    def close(self) -> None:
        self._board.close()


class Tracker:
    """A run of Weights & Biases, or of trackio, which has its functions. A resumed run goes on there.

    It is found by what `run_dir/wandb_id` or `run_dir/trackio_name` has. Weights & Biases keeps the first value of a
    step, so steps that a resume repeats keep their old values there.

    package  wandb or trackio
    options  of the run, by section, which both show
    """

    def __init__(
        self,
        package: str,
        log: LogConfig,
        options: Mapping[str, Any],
        run_dir: Path,
        first_step: int,
    ) -> None:
        try:
            self._package = importlib.import_module(package)
        except Exception as error:  # its many dependencies often disagree
            raise ConfigError(
                f"log.sinks={package}: it cannot be imported: {one_line(error)}"
            ) from None
        name = log.name or os.environ.get("WANDB_NAME") or run_dir.resolve().name
        settings: dict[str, Any] = {
            "project": log.project or os.environ.get("WANDB_PROJECT", "megatron_rlspec"),
            "config": dict(options),
        }
        new = uuid.uuid4().hex
        if package == "trackio":
            # It finds a run by its name, which runs in other directories may have, too.
            known = _known(run_dir / "trackio_name", f"{name}-{new[:6]}", first_step)
            self._run = self._package.init(**settings, name=known, resume="allow", embed=False)
            return
        known = _known(run_dir / "wandb_id", new, first_step)
        settings |= {"name": name, "id": known, "dir": str(run_dir)}
        try:
            self._run = self._package.init(**settings, resume="allow")
        except self._package.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"log.sinks=wandb: {reason}; WANDB_MODE=offline writes to {run_dir}/wandb"
            ) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [[str(row[column]) for column in COLUMNS] for row in rows]
        table = self._package.Table(columns=list(COLUMNS), data=data)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _known(file: Path, new: str, first_step: int) -> str:
    """Return what a resumed run has in `file`, or keep `new` there."""
    if first_step > 0 and file.exists():
        return file.read_text()
    files.write(file, new)
    return new


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
    for package in ("wandb", "trackio"):
        if package in log.sinks:
            sinks.append(Tracker(package, log, options, run_dir, first_step))
    return sinks
