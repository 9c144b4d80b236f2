"""Run `rlspec train` with an embedded engine that ends during the third step, for test_lost_engines.py.

With BACK in the environment, the run restarts that engine as if it had launched it; the first start fails.
"""

import os

from megatron_rlspec import cli
from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.kinds import KINDS
from megatron_rlspec.extensions.migration.builders import FleetEngines
from megatron_rlspec.rollout import restart
from megatron_rlspec.rollout.start import Kind, embedded
from megatron_rlspec.run import rollouts
from megatron_rlspec.run.extension import Extensions

generate = rollouts.Rollouts._generate
losses = []


def generate_and_lose(self, step):
    if step == 2 and not losses:
        losses.append(step)
        lose(next(iter(self.engines.pool.engines.values())))
    return generate(self, step)


def lose(engine):
    """Let the engine end when its second round, or a fleet's second tick, is about to begin."""
    serve = engine._serve
    rounds = []

    def ends(*arguments):
        rounds.append(arguments)
        if len(rounds) == 2:
            engine.close()
        serve(*arguments)

    engine._serve = ends


class Own(FleetEngines):
    restartable = ("embedded",)

    def again(self, name, number):
        if number == 1:
            raise EngineError("it ended while starting")
        return embedded(self._config)


rollouts.Rollouts._generate = generate_and_lose
if os.environ.get("BACK"):
    Extensions.kind = lambda self, engine: Kind(lambda config, *_: Own(config), KINDS["embedded"].follow)
    restart.PAUSES = (0.0, 0.2)
    restart.Restarts.__init__.__defaults__ = (restart.PAUSES,)
cli.main()
