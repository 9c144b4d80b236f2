"""Run `rlspec train`, which is killed between the two updates of its third rollout."""

import os
import signal

from megatron_rlspec import cli
from megatron_rlspec.train.step import Trainer

update = Trainer.train_step
updates = []


def dies(*arguments, **options):
    if len(updates) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    updates.append(arguments)
    return update(*arguments, **options)


Trainer.train_step = dies
cli.main()
