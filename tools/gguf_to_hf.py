"""Write a GGUF file (llama.cpp's format) of a Llama, Qwen2 or Qwen3 as a Hugging Face directory, dequantised.

    python tools/gguf_to_hf.py model.gguf my-model --dtype float32

Transformers and the package gguf read it. They ignore metadata that they do not know, so compare a text of the result
with one of llama.cpp's before you train it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("source", type=Path, metavar="FILE.gguf")
    p.add_argument("target", type=Path, metavar="DIR", help="it must not exist")
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="(default: bfloat16)"
    )
    args = p.parse_args(argv)
    if args.target.exists():
        p.error(f"{args.target} exists already; expected a new directory")
    dtype = getattr(torch, args.dtype)
    theirs = {"pretrained_model_name_or_path": args.source.parent, "gguf_file": args.source.name}
    config = AutoConfig.from_pretrained(**theirs)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = load_gguf_checkpoint(args.source, return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    # Scaled rotary embeddings are such a tensor, for example.
    if len(tensors) != len(GGUFReader(args.source).tensors):
        p.error(f"{args.source}: holds tensors that have no place in {type(model).__name__}")
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    partial = args.target.with_name(f"{args.target.name}.partial")
    AutoTokenizer.from_pretrained(**theirs).save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(args.target)


if __name__ == "__main__":
    main()
