"""Each probe tells the defective function from a repaired one, and this SGLang from the one before it.

SGLang is imported in a process of its own: on a CPU it needs stand-ins that must come first.
"""

import json
import subprocess
import sys
from functools import cache

import pytest

pytestmark = pytest.mark.slow

FLIPS = """
import json
from types import SimpleNamespace
from unittest import mock
import pytest

from megatron_rlspec.rollout.sglang.server import probes

probes.prepare()
seen = {name: [probe()] for name, probe in probes.PROBES.items()}

import sglang.srt.arg_groups.speculative_hook as hook
import sglang.srt.managers.scheduler_components.weight_updater as updater
import sglang.srt.managers.tokenizer_manager as tokenizer
import sglang.srt.speculative.eagle_utils as eagle

manager = updater.SchedulerWeightUpdaterManager

def target_only(self, request):  # as in 0.5.15
    success, message = self.tp_worker.update_weights_from_distributed(request)
    return SimpleNamespace(success=success, message=message)

def refusing(args):
    raise ValueError("speculative_adaptive cannot run")

def honest(self, meta, output, i):
    histogram = output.spec_correct_drafts_histogram[i]
    rounds = output.spec_verify_ct[i]
    meta["spec_accept_rate"] = sum(n * c for n, c in enumerate(histogram)) / (rounds * (len(histogram) - 1))

for target, name, fixed, probe in [
    (manager, "update_weights_from_distributed", target_only, "sglang-nccl-stale-drafter"),
    (hook, "_maybe_disable_adaptive", refusing, "sglang-adaptive-silently-off"),
    (tokenizer.TokenizerManager, "_calculate_spec_decoding_metrics", honest, "sglang-accept-rate-width"),
    (eagle, "_verify_uses_greedy", lambda *, is_all_greedy, **_: is_all_greedy, "sglang-cpu-greedy"),
]:
    with mock.patch.object(target, name, fixed):
        seen[probe].append(probes.PROBES[probe]())
print("\\n" + json.dumps(seen))
"""


@cache
def seen() -> dict[str, list[str | None]]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FLIPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_drafter_is_updated_over_nccl():
    now, target_only = seen()["sglang-nccl-stale-drafter"]
    assert now is None
    assert "never the drafter's" in target_only


def test_adaptive_is_dropped_with_a_warning():
    now, refusing = seen()["sglang-adaptive-silently-off"]
    assert "becomes False" in now
    assert refusing is None


def test_accept_rate_divides_by_the_starting_width():
    now, honest = seen()["sglang-accept-rate-width"]
    assert "rate of 0.33" in now
    assert honest is None


def test_cpu_verifies_greedily():
    now, honest = seen()["sglang-cpu-greedy"]
    assert now
    assert honest is None
