"""Run `rlspec train`, which is killed between the two updates of its third rollout."""

import os
import signal

from megatron_rlspec import cli
from megatron_rlspec.train.step import Trainer

update = Trainer._update
updates = []


def dies(*arguments):
    if len(updates) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    updates.append(arguments)
    return update(*arguments)


Trainer._update = dies
cli.main()
