"""The other families: names as Transformers writes them, logits of policy and drafter, and every layout."""

import pytest
import tiny_eagle3
import torch
from moe_oracles import DEEPSEEK_V3, GLM4_MOE, OPTIONS, checkpoint, logits, saved
from test_pushed_families import PUSHED, config_of
from test_pushed_families import checkpoint as pushed_checkpoint
from weight_oracles import megatron_logits, megatron_model, mtp_block, one_rank, spelling
from whole_tensors import spell, to_megatron

from megatron_rlspec.models.names import canonical, name_table

IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
OWN = {config["architectures"][0]: config for config in (GLM4_MOE, DEEPSEEK_V3)}
FAMILIES = {name: config_of(name) for name in PUSHED} | OWN


@pytest.mark.parametrize("model", FAMILIES)
def test_target_names_and_shapes_are_those_that_transformers_writes(model, tmp_path):
    config = FAMILIES[model]
    theirs = saved(config, tmp_path)
    assert set(name_table(config).target_names) == set(theirs)


def logits_in_megatron(config, tensors):
    megatron = megatron_model(config, **OPTIONS[config["architectures"][0]])
    full = dict(to_megatron(name_table(config, spec=spelling()), tensors, mtp_block=mtp_block()))
    unread = ("_extra_state", "local_tokens_per_expert")
    held = {n: t for n, t in megatron.state_dict().items() if not n.endswith(unread)}
    assert set(full) == set(held)
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(full[name])
    return megatron_logits(megatron, IDS, zero_first=False)


@pytest.mark.parametrize("model", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_policy_and_drafter_logits_equal_transformers(model, tmp_path):
    config = FAMILIES[model]
    tensors = checkpoint(config, tmp_path)
    target, draft = one_rank(logits_in_megatron, config, tensors)
    expected_target, expected_draft = logits(config, tensors, IDS, tmp_path)
    torch.testing.assert_close(target, expected_target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft, expected_draft, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("spec", ["local", "te"])
def test_round_trip_is_exact(model, spec, tmp_path):
    config = FAMILIES[model]
    tensors = (checkpoint if model in OWN else pushed_checkpoint)(config, tmp_path)
    family = name_table(config, spec=spec)
    assert set(family.target_names + family.drafter_names) | copies(family) == set(tensors)
    back = []
    for name, full in to_megatron(family, tensors):
        assert torch.equal(family.unshard(name, [family.shard(name, full, rank, 2) for rank in range(2)]), full)
        back += family.to_hf(name, full)
    assert len(back) == len(tensors) - len(copies(family))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back)
    names = {spell(family, name) for name in family.rows}
    assert {canonical(name) for name in names} == set(family.rows)


def copies(family):
    return {name for row in family.rows.values() for name in row.copies}


def test_transformer_engine_keeps_some_norms_apart():
    family = name_table(GLM4_MOE, spec="te")
    names = {name: spell(family, name) for name in family.rows}
    assert names["decoder.layers.0.pre_mlp_layernorm.weight"].endswith("0.mlp.linear_fc1.layer_norm_weight")
    assert names["decoder.layers.1.pre_mlp_layernorm.weight"] == "decoder.layers.1.pre_mlp_layernorm.weight"
    expert = "mtp.layers.0.transformer_layer.mlp.experts.local_experts.3.linear_fc2.weight"
    assert names[expert] == "mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.weight3"
    family = name_table(DEEPSEEK_V3, spec="te")
    latent = "decoder.layers.2.self_attention."
    assert spell(family, f"{latent}q_layernorm.weight") == f"{latent}linear_q_up_proj.layer_norm_weight"
    assert spell(family, f"{latent}kv_layernorm.weight") == f"{latent}linear_kv_up_proj.layer_norm_weight"
    assert spell(family, "decoder.layers.2.input_layernorm.weight") == "decoder.layers.2.input_layernorm.weight"
    down = torch.randn(24, 64)
    assert family.shard(f"{latent}linear_q_down_proj.weight", down, 0, 2) is down
    assert name_table(DEEPSEEK_V3).shard(f"{latent}linear_q_down_proj.weight", down, 0, 2).shape == (12, 64)


def test_an_external_drafters_round_trip_is_exact():
    config = tiny_eagle3.drafter_config(num_hidden_layers=2, fc_norm=True, norm_before_fc=True)
    tensors = tiny_eagle3.drafter_weights(config)
    family = name_table(config)
    back = dict(pair for name, full in to_megatron(family, tensors) for pair in family.to_hf(name, full))
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert set(family.drafter_names) == set(tensors) and not family.target_names
