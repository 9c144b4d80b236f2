"""Run `rlspec train` and kill the second fleet's engine, for test_two_fleets_run.py. KILLED says when:

asleep   when it is about to take over
leaving  when the samples have left the first fleet
awake    when it has taken over
"""

import os

from megatron_rlspec import cli
from megatron_rlspec.extensions.migration.second_fleet import SecondFleet

moment = os.environ["KILLED"]
take_over = SecondFleet.take_over
leave_first = SecondFleet._leave_first


def kill(self, now):
    if moment == now:
        (engine,) = self.engines.values()
        engine._process.process.kill()
        engine._process.process.wait()


def take_over_and_kill(self, *arguments):
    kill(self, "asleep")
    records = take_over(self, *arguments)
    kill(self, "awake")
    return records


def leave_and_kill(self, *arguments):
    leave_first(self, *arguments)
    kill(self, "leaving")


SecondFleet.take_over = take_over_and_kill
SecondFleet._leave_first = leave_and_kill
cli.main()
