"""Write a small MiMo with random weights: `python make_model.py --task DIR --out DIR`.

MiMo's shape on disk: a Qwen2 decoder with one MTP layer. SGLang loads it as MiMoForCausalLM and drafts with the MTP
layer; Transformers loads the decoder (`model_type` qwen2) and ignores the MTP tensors. The model is deep and narrow: at
these widths a layer costs about the same time on a CPU whatever its width, so only depth makes the drafter's one layer
cheap beside the policy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from megatron_rlspec.models.hf_files import write_hf


def describe(args: argparse.Namespace, vocabulary: int, eos: int, pad: int) -> dict:
    """Make config.json."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "intermediate_size": args.ffn,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,  # SGLang's MiMo supports no other value
        "attention_bias": True,
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "max_position_embeddings": args.max_length + 64,  # SGLang keeps some behind a sample, for drafts
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": eos,
        "bos_token_id": eos,
        "pad_token_id": pad,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": args.layers,
    }


def initial(config: dict, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw all tensors.

    Projections into the residual stream are scaled down by the depth. So the stream starts as the embedding (standard
    deviation 0.5), and twelve layers train at a high rate from the first step.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    ffn = config["intermediate_size"]
    head = config["head_dim"]
    q = config["num_attention_heads"] * head
    kv = config["num_key_value_heads"] * head

    def normal(rows: int, columns: int, std: float = 0.05) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    into_stream = 0.05 / math.sqrt(2 * config["num_hidden_layers"])

    def block(prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", normal(rows, hidden)
            yield f"{prefix}self_attn.{name}_proj.bias", torch.zeros(rows)
        yield f"{prefix}self_attn.o_proj.weight", normal(hidden, q, into_stream)
        yield f"{prefix}mlp.gate_proj.weight", normal(ffn, hidden)
        yield f"{prefix}mlp.up_proj.weight", normal(ffn, hidden)
        yield f"{prefix}mlp.down_proj.weight", normal(hidden, ffn, into_stream)
        yield f"{prefix}input_layernorm.weight", torch.ones(hidden)
        yield f"{prefix}post_attention_layernorm.weight", torch.ones(hidden)

    yield "model.embed_tokens.weight", normal(config["vocab_size"], hidden, 0.5)
    for layer in range(config["num_hidden_layers"]):
        yield from block(f"model.layers.{layer}.")
    yield "model.norm.weight", torch.ones(hidden)
    yield "lm_head.weight", normal(config["vocab_size"], hidden)
    drafter = "model.mtp_layers.0."
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        yield f"{drafter}{name}.weight", torch.ones(hidden)
    yield f"{drafter}input_proj.weight", normal(hidden, 2 * hidden)
    yield from block(drafter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", type=Path, required=True, help="directory with the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--ffn", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=512, help="longest sample, in tokens")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")

    tokenizer = AutoTokenizer.from_pretrained(args.task)
    config = describe(args, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    tensors = dict(initial(config, args.seed))
    write_hf(args.out, config, tensors, tokenizer_from=args.task)
    count = {True: 0, False: 0}
    for name, tensor in tensors.items():
        count[".mtp_layers." in name] += tensor.numel()
    print(f"{args.out}: {args.layers} layers of width {args.hidden}, {count[False]:,} parameters")
    print(f"{args.out}: a drafter of one layer, {count[True]:,} parameters")


if __name__ == "__main__":
    main()
