"""EAGLE-3 (arXiv 2503.01840) in plain torch: the logits of a chain of drafts, without a cache and one chain at a time.

Written from the paper and from SGLang's `models/llama_eagle3.py`. It shares nothing with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Eagle3Oracle:
    """A drafter beside a target whose embedding it reads. `tensors` have the names of the drafter's own directory."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: Tensor) -> None:
        self.config = config
        self.tensors = tensors
        self.embedding = embedding

    @torch.no_grad()
    def logits(
        self, taps: Tensor, tokens: Tensor, t: int, chain: Sequence[int], recursion: str = "before norm"
    ) -> Tensor:
        """Return `[1 + len(chain), S]`: the logits of the draft after x_{t+1}, and of those after each of the chain.

        taps       [T, 3 H] what the target's layers read at each position
        tokens     [T]
        recursion  the state that the next draft reads: "before norm" (EAGLE-3), or "after norm"
        """
        embedded = list(self.embedding[tokens[1 : t + 2]])
        states = list(taps[: t + 1] @ self.tensors["fc.weight"].T)
        found = []
        for token in [*chain, None]:
            out = self._layer(torch.stack(embedded), torch.stack(states))
            normed = self._norm(out, "norm.weight")
            found.append(normed @ self.tensors["lm_head.weight"].T)
            if token is not None:
                embedded.append(self.embedding[token])
                states.append(out if recursion == "before norm" else normed)
        return torch.stack(found)

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the layer's output at the last position, `[H]`; inputs `[T, H]`."""
        both = torch.cat(
            (
                self._norm(embedded, "midlayer.input_layernorm.weight"),
                self._norm(states, "midlayer.hidden_norm.weight"),
            ),
            dim=-1,
        )
        size = self.config["head_dim"]
        q, k, v = (
            (both @ self.tensors[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size))
            for name in "qkv"
        )
        repeat = q.shape[1] // k.shape[1]
        k = self._rotated(k).repeat_interleave(repeat, dim=1)
        scores = torch.einsum("hd,shd->hs", self._rotated(q)[-1], k) / size**0.5
        mixed = torch.einsum("hs,shd->hd", scores.softmax(-1), v.repeat_interleave(repeat, dim=1))
        residual = states[-1] + mixed.flatten() @ self.tensors["midlayer.self_attn.o_proj.weight"].T
        inner = self._norm(residual, "midlayer.post_attention_layernorm.weight")
        gate, up, down = (self.tensors[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return residual + (F.silu(inner @ gate) * (inner @ up)) @ down

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.tensors[name]

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate `[T, heads, D]` at positions 0 to T - 1, the halves of a head against each other."""
        half = x.shape[-1] // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angle = (torch.arange(len(x))[:, None] * frequency)[:, None]
        one, other = x.split(half, dim=-1)
        return torch.cat((one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()), dim=-1)
