"""Widen a small language model without changing what it computes, so that it costs what a large one costs.

    python benchmarks/gpu/widen.py MODEL OUT --times 4 --head-size 128 --kv-heads 6 --ffn 9216 --layers 32

SmolLM2-135M is the largest real model that fits through a narrow door, and its rounds are too short to tell anything
about a GPU. Its widened form has the same logits, so it has the same texts, rewards and acceptance. Its weights and its
KV cache have the size that the arguments say. A sentence that quotes a figure of it must say so.

What is added is 0, and each addition keeps the result:

    hidden size   zeros behind each hidden state. They shrink the mean square that RMSNorm divides by, so its weight
                  is multiplied by sqrt(narrow / wide), and eps by narrow / wide.
    head size     rotary pair i of the narrow head becomes pair i · (wide / narrow), which turns at the same frequency.
                  Scores are divided by a larger sqrt(head size), so queries are multiplied by sqrt(wide / narrow).
    heads         heads of zeros, in key-value groups of zeros. No query head joins a group that has keys: its
                  uniform attention would read values, and its output rows would get a gradient.
    MLP, layers   channels and layers of zeros

The gradient of every zero that is added is 0, too (but for the norms' weights of added layers, which nothing reads). So
RL on the widened model is RL on the narrow one, up to Adam's step on the weights that are multiplied by a constant.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.models.hf_files import copy_companions, read_hf, write_hf

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
    "token_layernorm",
    "hidden_layernorm",
    "final_layernorm",
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, a Qwen2 or a MiMo."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    layers: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Shape:
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            layers=config["num_hidden_layers"],
        )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads


def widened_shape(narrow: Shape, *, times: int, head_size: int, kv_heads: int, ffn: int, layers: int) -> Shape:
    """Return the wide shape; 0 keeps a size. Raises ValueError for one that cannot hold the narrow model."""
    wide = Shape(
        hidden=narrow.hidden * times,
        heads=(kv_heads or narrow.kv_heads) * narrow.heads_per_group,
        kv_heads=kv_heads or narrow.kv_heads,
        head_size=head_size or narrow.head_size,
        ffn=ffn or narrow.ffn,
        layers=layers or narrow.layers,
    )
    for name in ("hidden", "kv_heads", "head_size", "ffn", "layers"):
        if getattr(wide, name) < getattr(narrow, name):
            raise ValueError(f"{name}={getattr(wide, name)}: expected at least the model's {getattr(narrow, name)}")
    if wide.head_size % narrow.head_size:
        raise ValueError(f"head_size={wide.head_size}: expected a multiple of the model's {narrow.head_size}")
    return wide


@dataclass(frozen=True)
class Placing:
    """Where the rows or columns of a narrow tensor lie in the wide one: positions [narrow size], and the wide size."""

    positions: Tensor
    size: int


class Widening:
    """Puts the tensors of a narrow model into those of a wide one."""

    def __init__(self, narrow: Shape, wide: Shape) -> None:
        self.narrow = narrow
        self.wide = wide
        hidden = _first(narrow.hidden, wide.hidden)
        both = torch.cat([hidden.positions, wide.hidden + hidden.positions])
        queries = self._heads(narrow.heads, wide.heads)
        keys = self._heads(narrow.kv_heads, wide.kv_heads)
        ffn = _first(narrow.ffn, wide.ffn)
        # The last part of a tensor's name before .weight or .bias -> where its rows go, where its columns go
        self.places: dict[str, tuple[Placing | None, Placing]] = {
            "embed_tokens": (None, hidden),
            "lm_head": (None, hidden),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
            "input_proj": (hidden, Placing(both, 2 * wide.hidden)),  # of the MTP layer: [hidden state, embedding]
        }
        self.norm = hidden

    def tensor(self, name: str, narrow: Tensor) -> Tensor:
        """Return the wide form of a tensor. Raises ValueError for a name that no Llama, Qwen2 or MiMo has."""
        if name.removesuffix(".weight").endswith(NORMS):
            return _placed(narrow * math.sqrt(self.narrow.hidden / self.wide.hidden), [self.norm])
        part = name.split(".")[-2]
        if part not in self.places:
            raise ValueError(f"{name}: expected a tensor of a Llama, a Qwen2 or a MiMo")
        rows, columns = self.places[part]
        if part == "q_proj":
            narrow = narrow * math.sqrt(self.wide.head_size / self.narrow.head_size)
        if narrow.dim() == 1:
            return _placed(narrow, [rows])
        return _placed(narrow, [rows, columns])

    def added_layers(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield layers of zeros, with norms of ones, by the names of layer 0. `tensors` are wide."""
        first = "model.layers.0."
        for number in range(self.narrow.layers, self.wide.layers):
            for name, tensor in tensors.items():
                if not name.startswith(first):
                    continue
                is_norm = name.removesuffix(".weight").endswith(NORMS)
                fill = torch.ones_like if is_norm else torch.zeros_like
                yield name.replace(first, f"model.layers.{number}."), fill(tensor)

    def _heads(self, narrow: int, wide: int) -> Placing:
        """Place the channels of `narrow` heads in the first of `wide` heads, each rotary pair at its own frequency."""
        spread = self.wide.head_size // self.narrow.head_size
        first_halves = spread * torch.arange(self.narrow.head_size // 2)
        channels = torch.cat([first_halves, self.wide.head_size // 2 + first_halves])
        starts = self.wide.head_size * torch.arange(narrow)
        return Placing((starts[:, None] + channels).flatten(), wide * self.wide.head_size)


def _first(narrow: int, wide: int) -> Placing:
    return Placing(torch.arange(narrow), wide)


def _placed(narrow: Tensor, places: Sequence[Placing | None]) -> Tensor:
    """Return zeros that hold `narrow` at the given places of each dimension; None: a dimension that stays."""
    shape = [size if place is None else place.size for size, place in zip(narrow.shape, places, strict=True)]
    positions = [
        torch.arange(size) if place is None else place.positions
        for size, place in zip(narrow.shape, places, strict=True)
    ]
    wide = torch.zeros(shape, dtype=narrow.dtype)
    wide[torch.meshgrid(*positions, indexing="ij")] = narrow
    return wide


def widen(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], wide: Shape
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of the wide model. Names are those of Hugging Face, types stay."""
    narrow = Shape.of_config(config)
    widening = Widening(narrow, wide)
    widened = {}
    for name, tensor in tensors.items():
        widened[name] = widening.tensor(name, tensor.float()).to(tensor.dtype)
    widened |= dict(widening.added_layers(widened))
    sizes = {
        "hidden_size": wide.hidden,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "head_dim": wide.head_size,
        "intermediate_size": wide.ffn,
        "num_hidden_layers": wide.layers,
        "rms_norm_eps": config["rms_norm_eps"] * narrow.hidden / wide.hidden,
    }
    return {**config, **sizes}, widened


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="a directory with a Llama, a Qwen2 or a MiMo, with or without an MTP layer")
    p.add_argument("out", type=Path, help="where the wide model is written")
    p.add_argument("--times", type=int, default=4, help="hidden size over the model's (default: 4)")
    p.add_argument("--head-size", type=int, default=0, help="a multiple of the model's (default: as the model)")
    p.add_argument("--kv-heads", type=int, default=0, help="(default: as the model)")
    p.add_argument("--ffn", type=int, default=0, help="channels of the MLP (default: as the model)")
    p.add_argument("--layers", type=int, default=0, help="(default: as the model)")
    args = p.parse_args(argv)
    config, tensors = read_hf(args.model)
    try:
        wide = widened_shape(
            Shape.of_config(config),
            times=args.times,
            head_size=args.head_size,
            kv_heads=args.kv_heads,
            ffn=args.ffn,
            layers=args.layers,
        )
        wide_config, widened = widen(config, tensors, wide)
    except ValueError as error:
        p.error(str(error))
    write_hf(args.out, wide_config, widened)
    copy_companions(args.model, args.out)
    parameters = sum(tensor.numel() for tensor in widened.values())
    kv_bytes = 2 * wide.layers * wide.kv_heads * wide.head_size * 2
    print(f"{args.out}: {parameters / 1e9:.2f} G parameters, {kv_bytes / 1000:.0f} kB of KV cache a token in bfloat16")


if __name__ == "__main__":
    main()
