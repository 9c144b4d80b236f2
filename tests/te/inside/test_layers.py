"""The layers that our specs become, their parameters, and where they wait for a GPU."""

import re

from moe_oracles import GLM4_MOE
from test_experts import SMALL
from test_experts import build as build_experts
from test_host_sync import A_STEP, waits
from test_parallel_equality import PLAIN, build
from train_ranks import on_ranks

from megatron_rlspec.train import runtime

CELL = PLAIN | {"dtype": "float32"}


def classes(module):
    return {re.sub(r"\.\d+\.", ".N.", name): type(part).__name__ for name, part in module.named_modules()}


def built():
    dense = build(CELL)
    experts = build_experts(SMALL | {"first_k_dense_replace": 1}, model={})
    adam = type(dense.learner.optimizer.optimizer)
    made = {"dense": dense, "experts": experts}
    return (
        {name: (classes(t.policy), classes(t.drafter)) for name, t in made.items()},
        f"{adam.__module__}.{adam.__name__}",
        sorted(name for name, _ in experts.policy.named_parameters()),
    )


def test_the_transformer_engine_branch_is_taken():
    ((seen, adam, names),) = on_ranks(1, built)
    assert runtime.has_transformer_engine()
    assert adam == "transformer_engine.pytorch.optimizers.FusedAdam"
    policy, drafter = seen["dense"]
    layer = "decoder.layers.N."
    assert policy[f"{layer}self_attention.linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert policy[f"{layer}self_attention.linear_proj"] == "TERowParallelLinear"
    assert policy[f"{layer}self_attention.core_attention"] == "TEDotProductAttention"
    assert policy[f"{layer}mlp.linear_fc1"] == "TELayerNormColumnParallelLinear"
    assert policy["decoder.final_layernorm"] == "RMSNorm"
    (block,) = {name.rpartition(".")[0] for name in drafter if name.endswith(".self_attention")}
    assert drafter[f"{block}.self_attention.core_attention"] == "PackedAttention"  # chain-exact: no other one is
    assert drafter[f"{block}.self_attention.linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert drafter["mtp.layers.N.eh_proj"] == "TEColumnParallelLinear"
    policy, drafter = seen["experts"]
    for found, where in ((policy, layer.rstrip(".")), (drafter, block)):
        assert found[f"{where}.mlp.experts"] == "TEGroupedMLP"
        assert found[f"{where}.mlp.experts.linear_fc1"] == "TEColumnParallelGroupedLinear"
        assert found[f"{where}.mlp.experts.linear_fc2"] == "TERowParallelGroupedLinear"
        assert found[f"{where}.pre_mlp_layernorm"] == "RMSNorm"  # in front of a router, so not fused
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in names
    assert len([name for name in names if ".experts.linear_fc1." in name]) == GLM4_MOE["n_routed_experts"]


# The stand-ins of these two kernels read lengths of sequences; NVIDIA's are given them on the device.
STAND_INS = {"TEDotProductAttention.forward", "fused_apply_rotary_pos_emb_thd"}


def test_a_micro_batch_waits_nowhere():
    (((two, _), (three, _)),) = on_ranks(1, waits, "ce")
    each = three - two
    assert {place.split(":")[1] for place in each} == STAND_INS
    assert set(two - each - each) <= set(A_STEP)
