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


def test_an_external_drafters_round_trip_is_exact():
    config = tiny_eagle3.drafter_config(num_hidden_layers=2, fc_norm=True, norm_before_fc=True)
    tensors = tiny_eagle3.drafter_weights(config)
    family = name_table(config)
    back = dict(pair for name, full in to_megatron(family, tensors) for pair in family.to_hf(name, full))
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert set(family.drafter_names) == set(tensors) and not family.target_names
