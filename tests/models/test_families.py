"""The other families: names as Transformers writes them, logits of policy and drafter, and every layout."""

import pytest
import torch
import transformers
from moe_oracles import DEEPSEEK_V3, GLM4_MOE, OPTIONS, checkpoint, logits, saved
from test_pushed_families import PUSHED, config_of
from test_pushed_families import checkpoint as pushed_checkpoint
from weight_oracles import megatron_logits, megatron_model, mtp_block, one_rank, spelling
from whole_tensors import spell, to_megatron

from megatron_rlspec.models.names import canonical, name_table

IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
}
QWEN3_5 = {
    **{k: v for k, v in QWEN3_NEXT.items() if "expert" not in k},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
}
QWEN3_5_MOE = {**QWEN3_NEXT, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
OWN = {config["architectures"][0]: config for config in (GLM4_MOE, DEEPSEEK_V3, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)}
FAMILIES = {name: config_of(name) for name in PUSHED} | OWN
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "draft_vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "fc_norm": True,
    "norm_before_fc": True,
}


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


def with_drafter(config, tmp_path):
    """Make random tensors of any family. The drafter's block has the shapes of a full-attention layer of the target."""
    if config["architectures"][0] not in OWN:
        return pushed_checkpoint(config, tmp_path)
    if config["model_type"] in ("glm4_moe", "deepseek_v3"):
        return checkpoint(config, tmp_path)
    tensors = saved(config, tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors |= {n.replace("model.layers.3.", "mtp.layers.0."): t for n, t in tensors.items() if "layers.3." in n}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.empty(64)
    tensors["mtp.fc.weight"] = torch.empty(64, 128)
    return {n: 1 + torch.rand(t.shape, generator=generator) for n, t in tensors.items()}


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("spec", ["local", "te"])
def test_round_trip_is_exact(model, spec, tmp_path):
    config = {**FAMILIES[model], "mtp_num_hidden_layers": 1}
    tensors = with_drafter(config, tmp_path)
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


@pytest.mark.parametrize("model", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_delta_net_projection_is_megatrons_split_of_transformers_values(model):
    """Megatron splits its in_proj output into q|k|v, gate, beta, alpha; each must equal Transformers' value."""
    config = FAMILIES[model]
    known = {k: v for k, v in config.items() if k != "architectures"}
    layer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**known)).model.layers[0]
    module = layer.linear_attn
    x = torch.randn(1, 5, 64)
    family = name_table(config)
    row = family.row("decoder.layers.0.self_attention.in_proj.weight")
    parts = [module.get_parameter(name.removeprefix("model.layers.0.linear_attn.")) for name in row.hf]
    ours = x @ row.layout.fuse(parts).T
    if config is QWEN3_NEXT:
        theirs = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    else:
        theirs = [p(x) for p in (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)]
    flat = torch.cat([t.reshape(1, 5, -1) for t in theirs], dim=-1)
    torch.testing.assert_close(ours, flat)
    # Two ranks: each must hold half of every block, which is what megatron-core splits on one rank.
    half = family.shard(row.megatron, row.layout.fuse(parts), 1, 2)
    blocks = row.layout.fuse(parts).split([32, 32, 32, 32, 4, 4])
    assert torch.equal(half, torch.cat([block.chunk(2)[1] for block in blocks]))


def test_gated_attention_is_megatrons_split_of_transformers_values():
    """Megatron has queries, gates, key and value per group; Transformers' q_proj has (query, gate) per head."""
    known = {k: v for k, v in QWEN3_NEXT.items() if k != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**known))
    module = model.model.layers[3].self_attn
    row = name_table(QWEN3_NEXT).row("decoder.layers.3.self_attention.linear_qkv.weight")
    fused = row.layout.fuse([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight])
    x = torch.randn(5, 64)
    query, gate, key, value = (x @ fused.T).view(5, 2, -1).split([32, 32, 16, 16], dim=-1)
    theirs_query, theirs_gate = module.q_proj(x).view(5, -1, 32).chunk(2, dim=-1)
    torch.testing.assert_close(query.reshape(5, -1, 16), theirs_query)
    torch.testing.assert_close(gate.reshape(5, -1, 16), theirs_gate)
    torch.testing.assert_close(key.reshape(5, -1), module.k_proj(x))
    torch.testing.assert_close(value.reshape(5, -1), module.v_proj(x))


def test_gemma_norms_need_no_change_but_the_delta_nets_own():
    rows = name_table(QWEN3_NEXT).rows
    weight = torch.rand(16) + 0.5
    assert rows["decoder.layers.0.input_layernorm.weight"].layout.fuse([weight]) is weight
    gated = rows["decoder.layers.0.self_attention.out_norm.weight"].layout
    torch.testing.assert_close(gated.fuse([weight]), weight - 1)
    for dtype in (torch.float32, torch.bfloat16):
        exact = (torch.rand(1000) * 3.5 + 0.5).to(dtype)
        assert torch.equal(gated.split(gated.fuse([exact]))[0], exact)


def test_an_external_drafters_round_trip_is_exact():
    shapes = {
        "fc.weight": (64, 192),
        "norm.weight": (64,),
        "lm_head.weight": (32, 64),
        "midlayer.input_layernorm.weight": (64,),
        "midlayer.hidden_norm.weight": (64,),
        "midlayer.post_attention_layernorm.weight": (64,),
        "midlayer.self_attn.q_proj.weight": (64, 128),
        "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128),
        "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.mlp.gate_proj.weight": (96, 64),
        "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
    }
    shapes |= {name.replace("midlayer.", "layers.1."): shape for name, shape in shapes.items() if "midlayer." in name}
    shapes |= {f"layers.1.self_attn.{name}_proj.weight": (rows, 64) for name, rows in (("q", 64), ("k", 32), ("v", 32))}
    del shapes["layers.1.input_layernorm.weight"]
    shapes |= {"input_norm.weight": (192,)} | {f"fc_norm.{tap}.weight": (64,) for tap in range(3)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"d2t": torch.arange(32) * 3, "t2d": torch.arange(128) % 4 == 0}
    family = name_table(EAGLE3)
    back = dict(pair for name, full in to_megatron(family, tensors) for pair in family.to_hf(name, full))
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert set(family.drafter_names) == set(tensors) and not family.target_names
