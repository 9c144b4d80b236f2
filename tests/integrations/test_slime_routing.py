"""Real slime with routing replay and a drafter that is a mixture of experts, on a model of GLM4-MoE's shape."""

import functools

import pytest
import test_slime
import torch
from test_slime import OURS, policy, run_ranks

pytestmark = test_slime.pytestmark

# Full recomputation, so that the trunk replays in the backward pass, too, and the drafter runs twice.
GLM = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1] "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-dtype fp32 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
    "--moe-shared-expert-intermediate-size 16 --use-rollout-routing-replay "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
).split()
replayed = functools.partial(run_ranks, program="slime_routing.py")


@pytest.mark.timeout(600)
def test_trunk_replays_and_drafter_chooses():
    """On two context-parallel ranks."""
    without = replayed("replayed", 2, "none", *GLM)
    ours = replayed("replayed", 2, "drafter", *OURS, *GLM)
    for bare, rank in zip(without, ours, strict=True):
        assert bare["norm"] == rank["norm"]
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, policy(rank["parameters"])[n])]
        assert rank["stage"] == "replay_backward", "slime's own stage was not set back"
        trunk = [(used, own) for name, used, own in rank["choices"] if ".mtp." not in name]
        drafter = [(used, own) for name, used, own in rank["choices"] if ".mtp." in name]
        assert len(trunk) == 4 and len(drafter) == 2 * 2 * 3  # forward and recomputed; two micro-batches, three depths
        assert any(not torch.equal(used, own) for used, own in trunk), "the recording did not differ"
        for recorded, (used, _) in zip(rank["recorded"], trunk[::2], strict=True):
            assert torch.equal(torch.zeros_like(used).scatter_(1, recorded, True), used)
        assert all(torch.equal(used, own) for used, own in drafter)
        assert rank["losses"]["drafter_skipped"] == 0 and rank["losses"]["drafter_grad_norm"] > 0
