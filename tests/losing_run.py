"""`rlspec train`, but its engine ends while it draws the third step: what test_lost_engines.py starts."""

import threading

from megatron_rlspec import cli, rollouts

draw = rollouts.Rollouts._draw


def draw_and_lose(self, step):
    if step == 2:
        threading.Timer(0.02, self.engines.engines[0].close).start()
    return draw(self, step)


rollouts.Rollouts._draw = draw_and_lose
cli.main()
