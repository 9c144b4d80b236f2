"""Name tables agree with Transformers' classes and SGLang's drafter, by logits, round trips and shards."""

import pytest
import torch
from weight_oracles import (
    MIMO,
    megatron_logits,
    megatron_model,
    mimo_checkpoint,
    mimo_logits,
    mtp_block,
    one_rank,
    spelling,
)
from whole_tensors import to_megatron

from megatron_rlspec.models.names import name_table

IDS = torch.randint(0, MIMO["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))


def logits_in_megatron(config, tensors):
    model = megatron_model(config)
    full = dict(to_megatron(name_table(config, spec=spelling()), tensors, mtp_block=mtp_block()))
    parameters = dict(model.named_parameters())
    assert set(full) - {"output_layer.weight"} == set(parameters) - {"output_layer.weight"}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(full[name])
    return megatron_logits(model, IDS, zero_first=True)


@pytest.mark.parametrize("tied", [False, True])
def test_policy_and_drafter_logits_equal_transformers(tied):
    config, tensors = mimo_checkpoint(tie_word_embeddings=tied)
    target, draft = one_rank(logits_in_megatron, config, tensors)
    expected_target, expected_draft = mimo_logits(config, tensors, IDS)
    torch.testing.assert_close(target, expected_target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft, expected_draft, rtol=1e-4, atol=1e-4)


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
def test_round_trip_is_exact(spec, mtp_block, tied):
    config, tensors = mimo_checkpoint(tie_word_embeddings=tied)
    family = name_table(config, spec=spec)
    back = [pair for name, full in to_megatron(family, tensors, 160, mtp_block) for pair in family.to_hf(name, full)]
    assert len(back) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back)


def test_impossible_requests_are_refused_with_the_reason():
    config, tensors = mimo_checkpoint()
    family = name_table(config)
    with pytest.raises(ValueError, match="nearest: decoder.layers.0.self_attention.linear_qkv.weight"):
        list(family.to_hf("decoder.layers.0.self_attention.linear_kqv.weight", torch.zeros(1)))
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(ValueError, match="tensor parallel size 5: dimension 0 of shape .* into 5 parts"):
        family.shard(qkv, torch.zeros(192, 64), 0, 5)
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel is not converted; those are .*MiMoForCausalLM"):
        name_table({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ValueError, match="config.json has no 'vocab_size'"):
        name_table({k: v for k, v in config.items() if k != "vocab_size"})
