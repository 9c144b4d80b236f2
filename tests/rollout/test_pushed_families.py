"""Compare SGLang's own target and drafter classes after a push, for every family whose record says `pushed`.

A new record gets these tests by itself. If SGLang's class needs settings that no other family has, they go to `EXTRA`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_oracles import saved
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from weight_oracles import random_

from megatron_rlspec.models.families import FAMILIES, names_where
from megatron_rlspec.models.names import name_table
from megatron_rlspec.push.bucket import buckets
from megatron_rlspec.push.fingerprint import compare

PUSHED = names_where(lambda record: record.pushed)
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # at tensor parallel size 4 two ranks share a head
    "head_dim": 16,
    "vocab_size": 120,  # padded to 128, or to 256 at tensor parallel size 4
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "n_routed_experts": 8,
    "num_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "torch_dtype": "float32",
    "use_sliding_window": False,
}
EXTRA: dict[str, dict[str, Any]] = {
    "MiMoForCausalLM": {"model_type": "qwen2"},
    "LlamaForCausalLM": {"attention_bias": False},
    "Qwen3ForCausalLM": {"attention_bias": False},
    "Qwen3MoeForCausalLM": {"attention_bias": False},
    "DeepseekV3ForCausalLM": {
        "attention_bias": False,
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    types = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    config = {**BASE, "architectures": [architecture], "model_type": types.get(architecture)}
    drafts = FAMILIES[architecture].sglang_drafter
    return {**config, "num_nextn_predict_layers": int(bool(drafts)), **EXTRA.get(architecture, {}), **changes}


def checkpoint(config: dict[str, Any], folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Return the target as Transformers writes it, and the drafter: a decoder layer, norms, a projection [H, 2H]."""
    plain = {key: value for key, value in config.items() if key != "torch_dtype"}
    tensors = saved(plain, folder)
    layer = f"model.layers.{config['num_hidden_layers'] - 1}."
    hidden = config["hidden_size"]
    for name in name_table(config).drafter_names:
        like = [other for other in tensors if other.startswith(layer) and name.endswith(other.removeprefix(layer))]
        if like:
            tensors[name] = tensors[max(like, key=len)].clone()
        elif "norm" in name:
            tensors[name] = torch.empty(hidden)
        else:
            tensors[name] = torch.empty(hidden, 2 * hidden)
    random_(tensors, seed)
    if FAMILIES[config["architectures"][0]].qkv_bias == "or_zero" and config["attention_bias"] is False:
        for name in tensors:
            tensors[name] *= not name.endswith("_proj.bias")
    dtype = getattr(torch, config["torch_dtype"])
    return {name: tensor if "correction_bias" in name else tensor.to(dtype) for name, tensor in tensors.items()}


MODELS = {name: config_of(name) for name in PUSHED}
MODELS["MiMoForCausalLM of a Llama"] = config_of("MiMoForCausalLM", attention_bias=False)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_every_pushed_byte_is_in_the_right_place(sglang_models, model, tp, tmp_path):
    config = MODELS[model]
    family = name_table(config)
    tensors = checkpoint(config, tmp_path / "checkpoint")
    ranks = sglang_models.engine(config, tmp_path / "engine", tp)
    assert set(tensors) == set(family.target_names + family.drafter_names)
    for rank in ranks:
        held = rank.held()
        assert {part.name: part.shape for part in held} == {name: tuple(t.shape) for name, t in tensors.items()}
        assert {part.name for part in held if part.drafter} == set(family.drafter_names)
    for rank in ranks:
        rank.load(tensors)
    assert sglang_models.fingerprints(ranks) == sglang_models.expected(tensors)


MIXTURES = tuple(name for name in PUSHED if name_table(config_of(name)).experts)
WITH_SHARED = tuple(
    name for name in MIXTURES if any("shared_experts" in hf for hf in name_table(config_of(name)).by_hf)
)


def pushed(sglang_models, architecture, folder, tp=2, ep=1, fused=0, seed=0, **changes):
    """Return ranks that have loaded a checkpoint, and the checkpoint."""
    config = config_of(architecture, **changes)
    tensors = checkpoint(config, folder / "checkpoint", seed)
    ranks = sglang_models.engine(config, folder / "engine", tp, ep, fused=fused)
    for rank in ranks:
        rank.load(tensors)
    return ranks, tensors


def difference(sglang_models, ranks, tensors):
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return compare(sglang_models.expected(tensors), sglang_models.fingerprints(ranks, dtypes))


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_that_are_spread_over_ranks_are_found(sglang_models, architecture, tmp_path):
    ranks, tensors = pushed(sglang_models, architecture, tmp_path, tp=4, ep=2)
    assert difference(sglang_models, ranks, tensors).empty
    ranks[-1].target.model.layers[1].mlp.experts.w2_weight.data[-1, 3, 2] += 1
    assert difference(sglang_models, ranks, tensors).differing == ("model.layers.1.mlp.experts.7.down_proj.weight",)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_wrong_expert_is_named(sglang_models, architecture, tmp_path):
    ranks, tensors = pushed(sglang_models, architecture, tmp_path)
    layer = next(name for name in tensors if "experts.5.up_proj" in name).partition("experts.")[0] + "experts."
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    late = {name: tensor for name, tensor in new.items() if not name.startswith(f"{layer}5.")}
    for rank in ranks:
        rank.load(late)
    missing = difference(sglang_models, ranks, new)
    assert missing.differing == tuple(f"{layer}5.{part}_proj.weight" for part in ("down", "gate", "up"))
    for rank in ranks:
        rank.load(new)
    assert difference(sglang_models, ranks, new).empty
    experts = next(m for n, m in ranks[1].target.named_modules() if n == layer.removesuffix("."))
    experts.w13_weight.data[1:3] = experts.w13_weight.data[1:3].flip(0)
    swapped = difference(sglang_models, ranks, new).differing
    assert swapped == tuple(f"{layer}{e}.{part}_proj.weight" for e in (1, 2) for part in ("gate", "up"))
    experts.w13_weight.data[1:3] = experts.w13_weight.data[1:3].flip(0)
    experts = next(m for n, m in ranks[0].drafter.named_modules() if n.endswith("mlp.experts"))
    experts.w13_weight.data[3, -1, 0] += 1
    (found,) = difference(sglang_models, ranks, new).differing
    assert found in name_table(config_of(architecture)).drafter_names
    assert found.endswith(".mlp.experts.3.up_proj.weight")


@pytest.mark.parametrize("architecture", WITH_SHARED)
def test_a_shared_expert_among_the_routed_ones_is_found(sglang_models, architecture, tmp_path):
    """On an H100 SGLang keeps the shared expert in one parameter with the routed ones."""
    ranks, tensors = pushed(sglang_models, architecture, tmp_path, tp=4, ep=2, fused=1)
    experts = ranks[0].target.model.layers[1].mlp.experts
    assert len(experts.w13_weight) == 8 // 2 + 1
    assert difference(sglang_models, ranks, tensors).empty
    experts.w2_weight.data[-1, 0, 0] += 1
    assert difference(sglang_models, ranks, tensors).differing == (
        "model.layers.1.mlp.shared_experts.down_proj.weight",
    )


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "Qwen3ForCausalLM"])
def test_a_wider_stored_type_is_compared_in_the_type_pushed(sglang_models, architecture, tmp_path):
    ranks, tensors = pushed(sglang_models, architecture, tmp_path, torch_dtype="bfloat16")
    wider = {part.name for part in ranks[0].held() if part.part.dtype != tensors[part.name].dtype}
    assert all(name.endswith("mlp.gate.weight") for name in wider), wider
    assert bool(wider) == (architecture == "Glm4MoeForCausalLM")
    assert difference(sglang_models, ranks, tensors).empty
    assert set(compare(sglang_models.expected(tensors), sglang_models.fingerprints(ranks)).differing) == wider
    for name in wider:  # less than bfloat16 can hold
        held = next(part for part in ranks[0].held() if part.name == name)
        held.part.view(torch.int32)[0, 0] += 1
    assert set(difference(sglang_models, ranks, tensors).differing) == wider


def test_copies_that_latent_attention_decodes_with_are_compared(sglang_models, tmp_path, monkeypatch):
    """SGLang copies kv_b_proj after loading. A push renews the copies; if it did not, the tensor would differ."""
    ranks, tensors = pushed(sglang_models, "DeepseekV3ForCausalLM", tmp_path)
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    for rank in ranks:
        rank.load(new)
    assert difference(sglang_models, ranks, new).empty
    for model in ranks[0].models():
        monkeypatch.setattr(model, "post_load_weights", lambda **_: None)
    ranks[0].load(tensors)
    ranks[1].load(tensors)
    stale = difference(sglang_models, ranks, tensors).differing
    assert stale == tuple(f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(4))


def test_a_bucket_holds_all_tensors_that_latent_attention_fuses(sglang_models, tmp_path):
    """SGLang's loader silently drops `q_a_proj` and `kv_a_proj_with_mqa` if they come in two calls."""
    ranks, tensors = pushed(sglang_models, "DeepseekV3ForCausalLM", tmp_path)
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    for bucket in buckets(new.items(), limit=1):
        for rank in ranks:
            rank.load(dict(bucket))
    assert difference(sglang_models, ranks, new).empty
    for name, tensor in tensors.items():
        for rank in ranks:
            rank.load({name: tensor})
    dropped = difference(sglang_models, ranks, tensors).differing
    parts = ("kv_a_proj_with_mqa", "q_a_proj")
    assert dropped == tuple(f"model.layers.{n}.self_attn.{part}.weight" for n in range(4) for part in parts)
