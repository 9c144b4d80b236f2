"""`rlspec serve` that records what each rank decides: python ranks_serve.py FOLDER <its arguments>.

FOLDER/<rank> gets a JSON line for each round. With APART=1 in the environment nothing travels between ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec.rollout.sglang.http import serve


def record(folder: Path) -> None:
    """Have the controllers of the schedulers, which are children of this process, write their decisions."""
    from megatron_rlspec.rollout.sglang.scheduler import attention_ranks, controller, decisions

    decide = controller.ScheduleController._decide_together

    def recorded(self, ranks):
        lags = self.gap.lags(self._batch.reqs)
        decide(self, ranks)
        rates = decisions.decider.rule.acceptance.rates
        steps = -1 if self._config.off else self._config.num_steps
        line = [steps, *self._together, self._context, rates, len(lags), sum(lags), self._drafting]
        with (folder / str(torch.distributed.get_rank(ranks._group))).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def alone(self, share):
        row = share.row(self._deepest)
        rows = np.array([row if rank == self.rank else [0] * len(row) for rank in range(self.size)])
        return attention_ranks.Joint(rows, self.rank)

    controller.ScheduleController._decide_together = recorded
    if os.environ.get("APART"):
        attention_ranks.AttentionRanks.join = alone


if __name__ == "__main__":
    fork = serve._fork_children

    def then_record() -> None:
        fork()
        record(Path(sys.argv[1]))

    serve._fork_children = then_record
    serve.main(sys.argv[2:])
