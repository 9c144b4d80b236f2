"""Run `rlspec train`, which is killed when it begins to write the model card of its result."""

import os
import signal

from megatron_rlspec import cli
from megatron_rlspec.run import result


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


result.card = dies
cli.main()
