"""`rlspec convert --check`: compare the logits of two checkpoints.

The Megatron checkpoint runs in Megatron's modules, the Hugging Face one in Transformers' own classes. This module
computes the Hugging Face drafter around its transformer block, after SGLang's `mimo_mtp.py`. The Hugging Face side uses
no name table: if a table were wrong in both directions, the two errors would cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.config import load
from megatron_rlspec.conversion.convert import HfSource, is_hf
from megatron_rlspec.conversion.torch_dist import TorchDistReader
from megatron_rlspec.models.families import record_of
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.models.names import name_table
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.drafter import MTPDrafter
from megatron_rlspec.train.model import Policy, describe, transformer_config

_TOKENS = 64


def compare_logits(first: Path, second: Path, tolerance: float = 2e-3) -> str:
    """Compare logits; return one line with the largest differences. Raises ValueError above `tolerance`.

    Differences are relative to the standard deviation of the logits. One checkpoint is a Hugging Face one. The other is
    a Megatron one, or also a Hugging Face one, which is then read as Megatron would read it; its drafter may be new, so
    Transformers reads the drafter from there. Both models are in memory at the same time, in float32.
    """
    hf, megatron = (first, second) if is_hf(first) else (second, first)
    config, tensors = read_hf(hf)
    tokens = torch.randint(
        0, config["vocab_size"], (_TOKENS,), generator=torch.Generator().manual_seed(0)
    )
    expected = transformers_logits(config, tensors, tokens)
    if is_hf(megatron):
        config, tensors = read_hf(megatron)
        expected = (expected[0], transformers_logits(config, tensors, tokens)[1])
    computed = megatron_logits(megatron, config, tokens)
    report = []
    for what, ours, theirs in zip(("policy", "drafter"), computed, expected, strict=True):
        if ours is None or theirs is None:
            continue
        gap = float((ours - theirs).abs().max() / theirs.std())
        report.append(f"{what} {gap:.1e}")
        if not gap <= tolerance:
            raise ValueError(
                f"--check: the {what}'s logits differ from Transformers' by {gap:.1e} of their spread, "
                f"allowed are {tolerance:.0e}"
            )
    return f"logits are Transformers', up to so much of their spread: {', '.join(report)}, on {_TOKENS} tokens"


@torch.no_grad()
def megatron_logits(
    path: Path, config: Mapping[str, Any], tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the logits of `transformers_logits` in Megatron's modules, loaded from a checkpoint, on one rank."""
    options = load(overrides={"model.dtype": "float32", "model.path": str(path)})
    runtime.init_distributed(options.parallel)
    family = name_table(config)
    device = runtime.device()
    source = HfSource(family, read_hf(path)[1]) if is_hf(path) else TorchDistReader(path, family)
    model_config = transformer_config(config, options)
    rope = Rope.of(config)
    policy = Policy(model_config, config, options.model.max_length)
    modules = [policy]
    if family.drafter_names:
        rule = family.record.zero_first_embedding
        drafter = MTPDrafter(model_config, depth=1, zero_first_embedding=rule, rope=rope, seed=0)
        modules.append(drafter)
    for module in modules:
        for name, parameter in shards.global_names(module, model_config).items():
            parameter.copy_(source[name])
        module.to(device).eval()
    tokens = tokens.to(device)
    positions = torch.arange(len(tokens), device=device)
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    batch: Any = SimpleNamespace(tokens=tokens, position_ids=positions, cu_seqlens_padded=ends)
    packed = describe(batch, model_config, rope, device)
    hidden = policy(tokens[None], positions[None], None, packed_seq_params=packed)[:, 0]
    head = policy.head_weight().T
    if not family.drafter_names:
        return (hidden @ head).cpu(), None
    following = torch.cat((tokens[1:], tokens[:1]))
    embedding = policy.embedding.word_embeddings.weight
    (drafted,) = drafter(hidden, [following], embedding, positions, packed)
    return (hidden @ head).cpu(), (drafted @ head)[:-1].cpu()


@torch.no_grad()
def transformers_logits(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute logits of a dense checkpoint for tokens [L]: policy [L, V], drafter [L - 1, V] or None."""
    fields = dict(config)
    for name in ("architectures", "model_type", "torch_dtype", "dtype"):
        fields.pop(name, None)
    prefix = "model.mtp_layers.0."
    policy: dict[str, Tensor] = {}
    mtp: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            mtp[name.removeprefix(prefix)] = tensor.float()
        elif "mtp_layers" not in name:
            policy[name] = tensor.float()
    if config.get("tie_word_embeddings"):
        policy["lm_head.weight"] = policy["model.embed_tokens.weight"]
    target = _dense_model(config, fields)
    target.load_state_dict(policy)
    hidden = target.model(tokens[None]).last_hidden_state
    if not mtp:
        return target.lm_head(hidden)[0], None

    fields.pop("layer_types", None)
    fields["num_hidden_layers"] = 1
    block = _dense_model(config, fields).model
    inside = {"norm.weight": mtp["final_layernorm.weight"]}
    for name, tensor in mtp.items():
        if name.startswith(("self_attn", "mlp", "input_l", "post_att")):
            inside[f"layers.0.{name}"] = tensor
    block.load_state_dict(inside, strict=False)
    embedding = policy["model.embed_tokens.weight"][tokens[None, 1:]].clone()
    embedding[:, 0] = 0
    eps = config["rms_norm_eps"]

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], mtp[f"{name}.weight"], eps)

    normed_hidden = norm(hidden[:, :-1], "hidden_layernorm")
    pair = torch.cat((normed_hidden, norm(embedding, "token_layernorm")), dim=-1)
    drafted = block(inputs_embeds=pair @ mtp["input_proj.weight"].T).last_hidden_state
    return target.lm_head(hidden)[0], target.lm_head(drafted)[0]


def _dense_model(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    import transformers

    name = record_of(config).transformers
    made = getattr(transformers, f"{name}Config")(**fields)
    return getattr(transformers, f"{name}ForCausalLM")(made).float().eval()
