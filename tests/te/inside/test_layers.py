"""The layers that our specs become, and where they wait for a GPU."""

from test_experts import SMALL
from test_experts import build as build_experts
from test_host_sync import A_STEP, waits
from test_parallel_equality import PLAIN, build
from train_ranks import on_ranks


def classes():
    """Return the kinds of parts of a dense model and of one with experts, and the class of Adam."""
    dense = build(PLAIN | {"dtype": "float32"})
    experts = build_experts(SMALL | {"first_k_dense_replace": 1}, model={})
    kinds = [{type(part).__name__ for part in model.modules()} for model in (dense.policy, dense.drafter)]
    kinds += [{type(part).__name__ for part in model.modules()} for model in (experts.policy, experts.drafter)]
    return kinds, type(dense.learner.optimizer.optimizer).__module__


def test_the_transformer_engine_branch_is_taken():
    (((policy, drafter, *with_experts), adam),) = on_ranks(1, classes)
    assert adam == "transformer_engine.pytorch.optimizers"
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm"} <= policy
    assert {"TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "PackedAttention"} <= drafter
    assert "TEDotProductAttention" not in drafter  # chain-exact: no other one is
    for found in with_experts:
        assert {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"} <= found


# The stand-ins of these two kernels read lengths of sequences; NVIDIA's are given them on the device.
STAND_INS = {"TEDotProductAttention.forward", "fused_apply_rotary_pos_emb_thd"}


def test_a_micro_batch_waits_nowhere():
    (((two, _), (three, _)),) = on_ranks(1, waits, "ce")
    each = three - two
    assert {place.split(":")[1] for place in each} == STAND_INS
    assert set(two - each - each) <= set(A_STEP)
