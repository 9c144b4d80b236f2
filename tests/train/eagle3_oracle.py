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
        states = list(self._normed(taps[: t + 1]) @ self.tensors["fc.weight"].T)
        found = []
        for token in [*chain, None]:
            out = self._layers(torch.stack(embedded), torch.stack(states))
            normed = self._norm(out, "norm.weight")
            found.append(normed @ self.tensors["lm_head.weight"].T)
            if token is not None:
                embedded.append(self.embedding[token])
                states.append(out if recursion == "before norm" else normed)
        return torch.stack(found)

    def _normed(self, taps: Tensor) -> Tensor:
        """Apply the norms before `fc` that the drafter has: one over all inputs, then one for each layer's."""
        if "input_norm.weight" in self.tensors:
            taps = self._norm(taps, "input_norm.weight")
        if "fc_norm.0.weight" in self.tensors:
            parts = taps.split(self.config["hidden_size"], -1)
            taps = torch.cat([self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        return taps

    def _layers(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the last layer's output at the last position, `[H]`; inputs `[T, H]`."""
        embedded = self._norm(embedded, "midlayer.input_layernorm.weight")
        both = torch.cat((embedded, self._norm(states, "midlayer.hidden_norm.weight")), dim=-1)
        states = self._layer("midlayer.", both, states)
        for index in range(1, self.config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            states = self._layer(prefix, self._norm(states, f"{prefix}hidden_norm.weight"), states)
        return states[-1]

    def _layer(self, prefix: str, read: Tensor, states: Tensor) -> Tensor:
        """Return a layer's output `[T, H]`, whose attention reads `read`."""
        size = self.config["head_dim"]
        q, k, v = (
            (read @ self.tensors[f"{prefix}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)) for name in "qkv"
        )
        repeat = q.shape[1] // k.shape[1]
        k = self._rotated(k).repeat_interleave(repeat, dim=1)
        scores = torch.einsum("thd,shd->hts", self._rotated(q), k) / size**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(repeat, dim=1))
        residual = states + mixed.flatten(1) @ self.tensors[f"{prefix}self_attn.o_proj.weight"].T
        inner = self._norm(residual, f"{prefix}post_attention_layernorm.weight")
        gate, up, down = (self.tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
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
