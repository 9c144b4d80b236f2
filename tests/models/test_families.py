"""Every family's names: logits of policy and drafter in megatron-core and Transformers, round trips and shards."""

import pytest
import tiny_eagle3
import torch
from moe_oracles import CONFIGS, DEEPSEEK_V3, GLM4_MOE, IDS, OPTIONS, checkpoint, made
from test_pushed_families import PUSHED, config_of
from test_pushed_families import checkpoint as pushed_checkpoint
from weight_oracles import (
    megatron_logits,
    megatron_model,
    mimo_checkpoint,
    mimo_logits,
    mtp_block,
    one_rank,
    spelling,
)
from whole_tensors import spell, to_megatron

from megatron_rlspec.models.names import canonical, name_table


def logits_in_megatron(config, tensors):
    model = megatron_model(config, **OPTIONS.get(config["architectures"][0], {}))
    full = dict(to_megatron(name_table(config, spec=spelling()), tensors, mtp_block=mtp_block()))
    unread = ("_extra_state", "local_tokens_per_expert")
    held = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(unread)}
    assert set(full) - {"output_layer.weight"} == set(held) - {"output_layer.weight"}
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(full[name])
    return megatron_logits(model, IDS, zero_first=config["architectures"] == ["MiMoForCausalLM"])


@pytest.mark.parametrize("model", CONFIGS)
def test_policy_and_drafter_logits_equal_transformers(model, tmp_path):
    config, tensors, expected = made(model, tmp_path)
    torch.testing.assert_close(one_rank(logits_in_megatron, config, tensors), expected, rtol=1e-4, atol=1e-4)


def test_a_wrong_half_swap_changes_the_draft_logits_only():
    """The comparison above can fail: a round trip does not detect this mistake."""
    config, tensors = mimo_checkpoint()
    name = "model.mtp_layers.0.input_proj.weight"
    swapped = {**tensors, name: tensors[name].roll(config["hidden_size"], dims=1)}
    target, draft = one_rank(logits_in_megatron, config, swapped)
    expected_target, expected_draft = mimo_logits(config, tensors, IDS)
    torch.testing.assert_close(target, expected_target, rtol=1e-4, atol=1e-4)
    assert (draft - expected_draft).abs().max() > 0.1


@pytest.mark.parametrize(
    ("spec", "mtp_block", "tied"), [("local", "transformer_layer", True), ("te", "mtp_model_layer", False)]
)
def test_padding_of_the_vocabulary_and_the_copy_of_a_tied_head_are_left_out(spec, mtp_block, tied):
    config, tensors = mimo_checkpoint(tie_word_embeddings=tied)
    family = name_table(config, spec=spec)
    back = [pair for name, full in to_megatron(family, tensors, 160, mtp_block) for pair in family.to_hf(name, full)]
    assert len(back) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back)


def test_impossible_requests_are_refused_with_the_reason():
    config, _ = mimo_checkpoint()
    family = name_table(config)
    with pytest.raises(ValueError, match="no Megatron tensor decoder.layers.0.self_attention.linear_kqv.weight"):
        list(family.to_hf("decoder.layers.0.self_attention.linear_kqv.weight", torch.zeros(1)))
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(ValueError, match="tensor parallel size 5: dimension 0 of shape .* into 5 parts"):
        family.shard(qkv, torch.zeros(192, 64), 0, 5)
    with pytest.raises(ValueError, match="k has 64 rows, but config.json promises 32"):
        family.rows[qkv].layout.fuse([torch.zeros(128, 64), torch.zeros(64, 64), torch.zeros(32, 64)])


OWN = {config["architectures"][0]: config for config in (GLM4_MOE, DEEPSEEK_V3)}
FAMILIES = {name: config_of(name) for name in PUSHED} | OWN


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("spec", ["local", "te"])
def test_round_trip_is_exact(model, spec, tmp_path):
    config = FAMILIES[model]
    tensors = (checkpoint if model in OWN else pushed_checkpoint)(config, tmp_path)
    family = name_table(config, spec=spec)
    assert set(family.target_names + family.drafter_names) == set(tensors)
    back = []
    for name, full in to_megatron(family, tensors):
        assert torch.equal(family.unshard(name, [family.shard(name, full, rank, 2) for rank in range(2)]), full)
        back += family.to_hf(name, full)
    assert len(back) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back)
    names = {spell(family, name) for name in family.rows}
    assert {canonical(name) for name in names} == set(family.rows)


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
