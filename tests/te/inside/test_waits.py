"""Megatron's Transformer Engine branch waits for the GPU nowhere in a micro-batch, but where a stand-in computes."""

from test_host_sync import A_STEP, waits
from train_ranks import on_ranks

# The stand-ins of these two kernels read lengths of sequences; NVIDIA's are given them on the device.
STAND_INS = {"TEDotProductAttention.forward", "fused_apply_rotary_pos_emb_thd"}


def test_a_micro_batch_waits_nowhere():
    (((two, _), (three, _)),) = on_ranks(1, waits, "ce")
    each = three - two
    assert {place.split(":")[1] for place in each} == STAND_INS
    assert set(two - each - each) <= set(A_STEP)
