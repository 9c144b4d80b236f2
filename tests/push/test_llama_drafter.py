"""A Llama with a drafter: MiMo's names, biases of 0 in the checkpoint, none in Megatron, the same function."""

import pytest
import torch
from test_convert import same
from test_pushed_families import checkpoint, config_of
from transformers import AutoModelForCausalLM

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.models.config import check_config
from megatron_rlspec.models.hf_files import CheckpointError, read_hf, write_hf
from megatron_rlspec.models.names import name_table


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = config_of("LlamaForCausalLM", tie_word_embeddings=True, torch_dtype="float32")
    config = {key: value for key, value in config.items() if "expert" not in key and "group" not in key}
    for key in ("moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor"):
        del config[key]
    config |= {"use_qk_norm": False, "eos_token_id": 2}
    tensors = {n: t for n, t in checkpoint(config, folder / "names").items() if n != "lm_head.weight"}
    write_hf(folder / "llama", config, tensors)
    convert(plan(folder / "llama", folder / "with-drafter", add_mtp=True, to="hf"))
    return folder


def test_the_target_computes_what_the_llama_computes(llama):
    tokens = torch.arange(40)[None]
    logits = [AutoModelForCausalLM.from_pretrained(llama / name)(tokens).logits for name in ("llama", "with-drafter")]
    assert torch.equal(*logits)
    config, tensors = read_hf(llama / "with-drafter")
    assert (config["architectures"], config["model_type"]) == (["MiMoForCausalLM"], "llama")
    biases = [name for name in tensors if name.endswith("_proj.bias")]
    assert len(biases) == 3 * 4 and not any(tensors[name].count_nonzero() for name in biases)
    assert not [name for name in name_table(config).rows if name.endswith("bias")]
    check_config(config, "the model")


def test_it_goes_through_megatron_bit_for_bit(llama, tmp_path):
    convert(plan(llama / "with-drafter", tmp_path / "megatron"))
    convert(plan(tmp_path / "megatron", tmp_path / "back"))
    assert same(dict(read_hf(llama / "with-drafter")[1]), tmp_path / "back")


def test_a_bias_that_is_not_0_is_refused(llama, tmp_path):
    config, tensors = read_hf(llama / "with-drafter")
    name = "model.layers.1.self_attn.k_proj.bias"
    write_hf(tmp_path / "biased", config, {**tensors, name: tensors[name] + 1})
    with pytest.raises(CheckpointError, match="biases of q, k and v that are not 0"):
        convert(plan(tmp_path / "biased", tmp_path / "x"))
    assert not (tmp_path / "x").exists()
