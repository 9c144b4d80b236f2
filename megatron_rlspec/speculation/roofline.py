"""The cost of decode rounds by a model's sizes: a roofline. Nothing here is measured; `round_times.py` corrects it.

`rule.py`, `learning.py`, `graphs.py` and `extensions/migration/plans/` compare rounds by it. The unit of "ms" is free:
only ratios of costs count, and `RoundTimes` learns the factor to real ms. `of_layers` and `of_model` take one plain
pass at batch 1 as the unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rlspec.types import SpecConfig

# Tokens that a pass computes in the time of reading the weights; a guess between the GPUs that `of_layers` names.
RIDGE_TOKENS = 128.0
# Bounds of what a user or a file states: tokens are divided by a round's ms, and the fourth powers must not overflow.
LEAST_MS = 1e-12
MOST_MS = 1e15


@dataclass(frozen=True)
class Roofline:
    """The cost of a pass is the longer of two times, with a smooth transition: reading memory, and computing tokens.

    `to_json` travels in rules (`SpecRule.from_json`). Another value, name or order of a field, or a new field, discards
    the times that engines have learnt, because `RoundTimes` compares a checksum of `to_json`.

    weights_ms     to read once the weights that the target uses for one token
    token_ms       to compute one token of the target
    context_ms     to read the keys and values of one context token
    drafter        duration of a drafter pass, as a share of a target pass
    host_ms        launches, once per round
    pass_ms        launch, once per drafter pass
    drafter_layer  the share of a drafter pass that its layer takes; the output head takes the rest
    experts        the share of `weights_ms` that reads one token's routed experts; a pass reads those of all its tokens
    used           routed experts that a token uses, as a share of all; above 0
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
        """Return the ms in which the drafter reads one missed token: its layer, without the output head."""
        return self.drafter_layer * self.drafter * self.token_ms

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value <= MOST_MS:
                raise ValueError(f"{name}={value}: expected a number from 0 to {MOST_MS:g}")
        if not self.used:
            raise ValueError(
                "used=0: expected the share of the experts that a token uses, 1 without experts"
            )
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
        # weights_ms, token_ms, context_ms, drafter
        return cls(1.0, 1.0 / ridge_tokens, 0.0, 1.0 / layers)

    @classmethod
    def of_model(
        cls,
        config: Mapping[str, Any],
        ridge_tokens: float = RIDGE_TOKENS,
        draft_vocabulary: int = 0,
    ) -> Roofline:
        """Make the cost model of a model's sizes. Its unit is one plain pass at batch 1.

        config            the text model's config.json; an EAGLE-3 drafter's config.json in it as "eagle3"
        ridge_tokens      as in `of_layers`
        draft_vocabulary  token ids that drafts are chosen from; 0: those of the EAGLE-3 drafter, else all

        A pass costs what its parameters cost, layers and output head; looking up an embedding is free. It also reads
        the keys and values of every context token, in the type of the weights, once for all tokens that it verifies. It
        computes the experts that each token uses, and reads the experts that any of its tokens uses, as if tokens chose
        at random. The drafter is one layer, or the layers of the EAGLE-3 drafter, a projection before it, and a head
        over the draft vocabulary. `host_ms`, `pass_ms` and `sample_ms` stay 0.

        Raises KeyError for a config without one of the four sizes that every model has: `hidden_size`, `vocab_size`,
        `num_hidden_layers` and `num_attention_heads`.
        """
        hidden = config["hidden_size"]
        layer = _attention(config) + _mlp(config)
        head = hidden * config["vocab_size"]
        eagle3 = config.get("eagle3", {})
        draft_layer = eagle3.get("num_hidden_layers", 1) * layer + 2 * hidden * hidden
        words = draft_vocabulary or eagle3.get("draft_vocab_size") or config["vocab_size"]
        draft_head = hidden * words
        target = config["num_hidden_layers"] * layer + head
        drafter = draft_layer + draft_head
        routed, used = _experts(config)
        # by position: weights_ms, token_ms, context_ms, drafter
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
        """Compute ms of a target pass over `tokens` new tokens of all requests, with `context` tokens in their caches.

        Both have one shape, or shapes that numpy broadcasts; the result has that shape.
        """
        # Parameters of the experts that some token uses, in multiples of those that one token uses. No token uses an
        # expert with probability (1 - used)^tokens.
        routed = (1 - (1 - self.used) ** tokens) / self.used
        weights = self.weights_ms * (1 - self.experts + self.experts * routed)
        reading = weights + self.context_ms * context
        computing = self.token_ms * tokens
        return (reading**4 + computing**4) ** 0.25  # a smooth maximum

    def grid(
        self,
        configs: Sequence[SpecConfig],
        batch: np.ndarray,
        context: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Compute ms of a round of each configuration, `[configs, *broadcast(batch, context)]`.

        The terms are those of docs/design.md, Round cost.

        batch    requests of the round, an array or a number
        context  tokens in the caches of all of them together, the same
        drafts   `[configs]`: drafts that a request verifies on average; None: all. With one configuration also `[n]`:
                 the result is then `[n, *broadcast(batch, context)]`
        """
        batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
        # configurations are the last axis until the end
        batch, context = batch[..., None], context[..., None]
        steps = np.array([config.num_steps for config in configs])
        drafter = np.array([float(config.drafter) for config in configs])
        verified = batch * (1 + (steps if drafts is None else drafts))
        verify = self.target_ms(verified, context)
        # One drafter pass over the verified tokens. Then, for every further draft, one over a token of each request.
        # OFF has neither; SGLang's step 0 has the first.
        extend = drafter * (self.drafter * verify + self.pass_ms)
        step = self.drafter * self.target_ms(batch, context) + self.pass_ms
        drafting = extend + np.maximum(steps - 1, 0) * step
        ms = self.host_ms + self.sample_ms * verified + verify + drafting
        return np.moveaxis(ms, -1, 0)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Roofline:
        """Return the cost of `to_json`. Raises ValueError for bad numbers, TypeError for unknown or missing fields."""
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
        # the last: the output projection
        return into_queries + into_latent + into_keys + heads * value * hidden
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * hidden * head * (heads + kv_heads)  # queries and output, keys and values


def _full_attention_layers(config: Mapping[str, Any]) -> int:
    """Count the layers whose keys and values grow with the context; sliding windows and linear attention do not."""
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
