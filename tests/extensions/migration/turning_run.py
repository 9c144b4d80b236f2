"""Run `rlspec train` and kill the second fleet's engine, for test_turns_run.py. KILLED in the environment says when:

asleep   when it is about to take over
leaving  when the samples are on their way to it, and the first fleet sleeps: as if GPUs had no room for both
awake    when it has taken over
"""

import os

from megatron_rlspec import cli
from megatron_rlspec.extensions.migration import builders
from megatron_rlspec.extensions.migration.exchange import Exchange, Footprint, order
from megatron_rlspec.extensions.migration.turns import Turns

moment = os.environ["KILLED"]
change = Turns.change
sleep = Exchange._sleep


def kill(engines):
    (engine,) = engines.values()
    engine._process.process.kill()
    engine._process.process.wait()


def change_and_kill(self, *arguments):
    if moment == "asleep":
        kill(self.second)
    changed = change(self, *arguments)
    if moment == "awake":
        kill(self.second)
    return changed


def sleep_and_kill(self):
    sleep(self)
    if moment == "leaving":
        kill(self._new)


Turns.change = change_and_kill
Exchange._sleep = sleep_and_kill
if moment == "leaving":
    builders.calls = lambda *_: order(Footprint(1, 1), Footprint(1, 1), 2)
cli.main()
