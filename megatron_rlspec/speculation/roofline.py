"""The cost of decode rounds: a roofline of a model's sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rlspec.types import SpecConfig

# of a pass that computes as long as it reads the weights; rounds correct what follows from it
RIDGE_TOKENS = 128.0
LEAST_MS = 1e-12
MOST_MS = 1e15


@dataclass(frozen=True)
class Roofline:
    """The longer of two times, with a smooth transition: reading weights and context, and computing tokens.

    weights_ms     to read the target's weights once
    token_ms       to compute one token of the target
    context_ms     to read the keys and values of one context token
    drafter        duration of a drafter pass, as a share of a target pass
    host_ms        launches, once per round
    pass_ms        launch, once per drafter pass
    drafter_layer  the share of a drafter pass that its layer takes; the output head takes the rest
    experts        the share of `weights_ms` that reads one token's routed experts; a pass reads those of all its tokens
    used           experts that a token uses, as a share of all
    sample_ms      to sample a verified token, with its log-prob: passes over the vocabulary, beside the target's pass
    """

    weights_ms: float
    token_ms: float
    context_ms: float
    drafter: float
    host_ms: float = 0.0
    pass_ms: float = 0.0
    drafter_layer: float = 1.0
    experts: float = 0.0
    used: float = 1.0
    sample_ms: float = 0.0

    @property
    def catch_up_ms(self) -> float:
        """Return the ms of one token in the drafter's layer. Only the last token needs logits."""
        return self.drafter_layer * self.drafter * self.token_ms

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value <= MOST_MS:
                raise ValueError(f"{name}={value}: expected a number from 0 to {MOST_MS:g}")
        if not self.used:
            raise ValueError(
                "used=0: expected the share of the experts that a token uses, 1 without experts"
            )
        # tokens are divided by it
        if self.weights_ms + self.token_ms + self.host_ms < LEAST_MS:
            raise ValueError(
                "weights_ms, token_ms and host_ms are 0: expected a round that takes time"
            )

    @classmethod
    def of_layers(cls, layers: int, ridge_tokens: float = RIDGE_TOKENS) -> Roofline:
        """Make a cost model of nothing but `layers`, of which the drafter has one. Its unit is one plain pass.

        `ridge_tokens` is the number of tokens that a pass computes in the time of reading the weights: about 37 on an
        H20, 150 on an A100, 300 on an H100, by the vendors' data sheets. None of this is measured.
        """
        return cls(1.0, 1.0 / ridge_tokens, 0.0, 1.0 / layers)

    @classmethod
    def of_model(
        cls,
        config: Mapping[str, Any],
        ridge_tokens: float = RIDGE_TOKENS,
        draft_vocabulary: int = 0,
    ) -> Roofline:
        """Make the cost model of a model's sizes. Its unit is one plain pass at batch 1.

        `config` is the model's config.json. A pass costs what its parameters cost, layers and output head; looking up
        an embedding is free. It also reads the keys and values of every context token, in the type of the weights, once
        for all tokens that it verifies. Of experts those are computed that a token uses, and those are read that a
        pass's tokens use, if each chooses for itself. The drafter is one layer, or those of the EAGLE-3 drafter in
        `config`, the projection before it, and a head over `draft_vocabulary` words; 0: all, or that drafter's.
        `ridge_tokens` as in `of_layers`.
        """
        hidden = config["hidden_size"]
        layer = _attention(config) + _mlp(config)
        head = hidden * config["vocab_size"]
        own = config.get("eagle3", {})
        draft_layer = own.get("num_hidden_layers", 1) * layer + 2 * hidden * hidden
        words = draft_vocabulary or own.get("draft_vocab_size") or config["vocab_size"]
        draft_head = hidden * words
        target = config["num_hidden_layers"] * layer + head
        drafter = draft_layer + draft_head
        routed, used = _experts(config)
        return cls(
            1.0,
            1.0 / ridge_tokens,
            _full_attention_layers(config) * _keys_and_values(config) / target,
            drafter / target,
            drafter_layer=draft_layer / drafter,
            experts=config["num_hidden_layers"] * routed / target,
            used=used,
        )

    def target_ms(self, tokens: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Compute ms of a target pass over `tokens` new tokens with `context` tokens in the cache."""
        # experts, in multiples of those of one token
        routed = (1 - (1 - self.used) ** tokens) / self.used
        weights = self.weights_ms * (1 - self.experts + self.experts * routed)
        reading = weights + self.context_ms * context
        computing = self.token_ms * tokens
        return (reading**4 + computing**4) ** 0.25

    def grid(
        self,
        configs: Sequence[SpecConfig],
        batch: np.ndarray,
        context: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Compute ms of a round, `[configs, *broadcast(batch, context)]` (docs/design.md, Round cost).

        drafts  `[configs]`, or `[n]` for one configuration: that a request verifies on average; None: all
        """
        batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
        batch, context = batch[..., None], context[..., None]
        steps = np.array([config.num_steps for config in configs])
        drafter = np.array([float(config.drafter) for config in configs])
        verified = batch * (1 + (steps if drafts is None else drafts))
        verify = self.target_ms(verified, context)
        extend = drafter * (self.drafter * verify + self.pass_ms)
        step = self.drafter * self.target_ms(batch, context) + self.pass_ms
        drafting = extend + np.maximum(steps - 1, 0) * step
        ms = self.host_ms + self.sample_ms * verified + verify + drafting
        return np.moveaxis(ms, -1, 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Roofline:
        return cls(**data)


def _attention(config: Mapping[str, int]) -> int:
    """Count the parameters of one layer's attention: with key/value heads, or latent (DeepSeek-V2, section 2.1)."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    if latent := config.get("kv_lora_rank"):
        rope = config.get("qk_rope_head_dim") or 0
        plain = config.get("qk_nope_head_dim", 0)
        query = heads * (plain + rope)
        value = config.get("v_head_dim", 0)
        rank = config.get("q_lora_rank") or 0
        into_queries = rank * (hidden + query) if rank else hidden * query
        into_latent = hidden * (latent + rope)
        into_keys = latent * heads * (plain + value)
        return into_queries + into_latent + into_keys + heads * value * hidden
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * hidden * head * (heads + kv_heads)


def _full_attention_layers(config: Mapping[str, Any]) -> int:
    """Count the layers whose keys and values grow with the context."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return sum(kind == "full_attention" for kind in kinds)


def _keys_and_values(config: Mapping[str, int]) -> int:
    """Count the numbers that one layer's cache holds of a token: keys and values of each head, or the latent."""
    if latent := config.get("kv_lora_rank"):
        return latent + (config.get("qk_rope_head_dim") or 0)
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * head * (config.get("num_key_value_heads") or heads)


def _mlp(config: Mapping[str, int]) -> int:
    """Count the parameters of one layer's MLP that a token uses: gate, up and down, of its experts if there are any."""
    width = config.get("intermediate_size") or 4 * config["hidden_size"]
    used = config.get("num_experts_per_tok")
    if used and (expert := config.get("moe_intermediate_size")):
        width = expert * (used + (config.get("n_shared_experts") or 0))
    return 3 * config["hidden_size"] * width


def _experts(config: Mapping[str, int]) -> tuple[int, float]:
    """Count the parameters of one layer's routed experts that a token uses, and their share of all routed experts."""
    total = (
        config.get("n_routed_experts")
        or config.get("num_experts")
        or config.get("num_local_experts")
    )
    used = config.get("num_experts_per_tok")
    expert = config.get("moe_intermediate_size")
    if not (total and used and expert):
        return 0, 1.0
    return 3 * config["hidden_size"] * expert * used, used / total
