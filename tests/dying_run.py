"""Run `rlspec train`, whose rank 1 is killed in the middle of a change of the tensor-parallel size, in the third step.

RUN in the environment is the run's directory. The file RUN.killed tells the moment.
"""

import os
import signal
from pathlib import Path

from megatron_rlspec import cli
from megatron_rlspec.extensions.migration.embedded import retile
from megatron_rlspec.records.recorder import read_records

part_of = retile._part_of
moved = []


def dies(*pieces):
    moved.append(pieces)
    if os.environ["RANK"] == "1" and len(moved) % 2 == 0 and len(read_records(Path(RUN) / "metrics.jsonl")) == 2:
        Path(f"{RUN}.killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return part_of(*pieces)


RUN = os.environ["RUN"]
retile._part_of = dies
cli.main()
