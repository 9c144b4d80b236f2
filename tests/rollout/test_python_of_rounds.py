"""What our hooks cost a decode round in Python: a committed list, in bytecodes for each request and each round.

All of it runs in the scheduler's one thread. `python benchmarks/round_python.py` prints it in microseconds.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from python_work import PythonWork

from megatron_rlspec.extensions.migration.sglang import kv_moves
from megatron_rlspec.rollout.sglang.scheduler import aborts, control, decisions
from megatron_rlspec.rollout.sglang.scheduler.drafter_gap import DrafterGap
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig

ALLOWED = {  # what a hook does -> (most bytecodes a request, a round, why)
    "decide": (15, 2500, "missed tokens of each request, and the rule, which knows none of them"),
    "mark": (70, 0, "one mark for each token that a client is sent"),
    "end": (40, 0, "an aborted sample may end by itself in its last round"),
    "observe": (60, 2000, "the prefix tree, who goes on, and the accepted counts"),
    "record": (20, 200, "names of the requests, to see whether they are those of the round before"),
}


class Round:
    """A decode round of so many requests, hook by hook."""

    def __init__(self, requests, monkeypatch):
        self.reqs = [
            SimpleNamespace(
                rid=str(i),
                finished=lambda: False,
                is_retracted=False,
                to_finish=None,
                skip_radix_cache_insert=False,
                output_ids=[1],
                customized_info=None,
            )
            for i in range(requests)
        ]
        self.spec_algorithm = SimpleNamespace(is_none=lambda: False)
        self.decider = decisions.Decider(Settings())
        self.decider.start([0, 1, 3], 3)
        monkeypatch.setattr(decisions, "decider", self.decider)
        self.decider.replace({"roofline": Roofline(0.0, token_ms=1 / 32, context_ms=1 / 1000, drafter=0.1).to_json()})
        self.gap = DrafterGap(None)
        self.record()

    def decide(self):
        self.decider.choose(len(self.reqs), 600 * len(self.reqs), lambda n: self.gap.missed(self.reqs, n))
        kv_moves.before_round(self.reqs)

    def mark(self):
        for request in self.reqs:
            control._mark_drafts(request, 1)
            request.output_ids += [1, 1]

    def end(self):
        for request in self.reqs:
            aborts.end_first(lambda *_: None, request)

    def observe(self):
        ran = decisions.DecodeRound(SpecConfig(3), 600 * len(self.reqs), None)
        result = SimpleNamespace(
            num_correct_drafts_per_req_cpu=[i % 4 for i in range(len(self.reqs))], rlspec_round=ran
        )
        control._after_decode(lambda *_: None, None, self, result)

    def record(self):
        self.gap.record(self.reqs, torch.zeros(len(self.reqs), 1), torch.zeros(len(self.reqs), dtype=torch.int64))


@pytest.mark.parametrize("hook", ALLOWED)
def test_a_round_costs_no_more_python_than_is_allowed(hook, monkeypatch):
    """The most of several rounds, by two batch sizes: what each request costs, and what is left."""
    most = []
    for requests in (64, 256):
        one = Round(requests, monkeypatch)
        for _ in range(3):
            getattr(one, hook)()
        spent = []
        for _ in range(8):
            with PythonWork() as work:
                getattr(one, hook)()
            spent.append(work.bytecodes)
        most.append(max(spent))
    a_request = (most[1] - most[0]) / 192
    of_a_request, of_a_round, _ = ALLOWED[hook]
    assert 0 < a_request <= of_a_request and most[1] - 256 * a_request <= of_a_round, (a_request, most)


@pytest.mark.slow
def test_the_benchmark_calls_hooks_that_exist():
    program = Path(__file__).parents[2] / "benchmarks" / "round_python.py"
    command = [sys.executable, str(program), "--requests", "4", "--off", "64"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "observation, drafting" in ended.stdout
