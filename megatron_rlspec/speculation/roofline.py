"""A roofline model of the cost of decode rounds, for simulated tables and for choices without a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.types import SpecConfig

# Dense bf16 by the vendors' data sheets: memory bandwidth in TB/s, TFLOPS.
HARDWARE = {
    "A40": (0.696, 150.0),
    "L40S": (0.864, 362.0),
    "A100": (2.04, 312.0),
    "H100": (3.35, 989.0),
    "H20": (4.0, 148.0),
    "H200": (4.8, 989.0),
}


@dataclass(frozen=True)
class Roofline:
    """The longer of two times, with a smooth transition: reading weights and context, and computing tokens.

    weights_ms     to read the target's weights once
    token_ms       to compute one token of the target
    context_ms     to read the keys and values of one context token
    drafter        duration of a drafter pass, as a share of a target pass
    host_ms        launch and sampling, once per round
    pass_ms        launch, once per drafter pass
    switch_ms      to change the configuration between two rounds
    drafter_layer  the share of a drafter pass that its layer takes; the output head takes the rest
    """

    weights_ms: float
    token_ms: float
    context_ms: float
    drafter: float
    host_ms: float = 0.0
    pass_ms: float = 0.0
    switch_ms: float = 0.0
    drafter_layer: float = 1.0

    @property
    def catch_up_ms(self) -> float:
        """Return the ms of one token in the drafter's layer. Only the last token needs logits."""
        return self.drafter_layer * self.drafter * self.token_ms

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be finite and not negative")

    @classmethod
    def of_layers(cls, target_layers: int, drafter_layers: int = 1, ridge_tokens: float = 128.0) -> Roofline:
        """Make the cost model that is used without a table. Its unit is one plain pass at batch 1. Raises ValueError.

        Every layer, of target or drafter, costs the same. `ridge_tokens` is the number of tokens that a pass computes
        in the time of reading the weights: about 37 on an H20, 150 on an A100, 300 on an H100, by the vendors' data
        sheets. None of this is measured.
        """
        if min(target_layers, drafter_layers) < 1 or ridge_tokens <= 0:
            raise ValueError(
                f"target_layers={target_layers}, drafter_layers={drafter_layers}, ridge_tokens must be > 0"
            )
        return cls(1.0, 1.0 / ridge_tokens, 0.0, drafter_layers / target_layers)

    @classmethod
    def of_hardware(
        cls,
        bandwidth: float,
        tflops: float,
        *,
        parameters: float = 7.6e9,
        context_bytes: float = 147_456.0,
        drafter: float = 0.1,
        drafter_layer: float = 0.3,
        read_efficiency: float = 0.8,
        compute_efficiency: float = 0.6,
        host_ms: float = 1.5,
        pass_ms: float = 0.2,
    ) -> Roofline:
        """Make the cost model of a GPU: `bandwidth` in TB/s, bf16 weights. Defaults: 7B, 8 KV heads, 36 layers."""
        per_ms = bandwidth * 1e9 * read_efficiency
        return cls(
            weights_ms=2 * parameters / per_ms,
            token_ms=2 * parameters / (tflops * 1e9 * compute_efficiency),
            context_ms=context_bytes / per_ms,
            drafter=drafter,
            drafter_layer=drafter_layer,
            host_ms=host_ms,
            pass_ms=pass_ms,
        )

    def target_ms(self, tokens: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Compute ms of a target pass over `tokens` new tokens with `context` tokens in the cache."""
        read = self.weights_ms + self.context_ms * context
        return (read**4 + (self.token_ms * tokens) ** 4) ** 0.25

    def grid(self, configs: Sequence[SpecConfig], batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Compute ms of a round, `[configs, *broadcast(batch, context)]`: docs/design.md, Round cost."""
        batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
        rows = []
        for config in configs:
            tokens = batch * (config.num_draft_tokens or 1)
            ms = self.host_ms + self.target_ms(tokens, context)
            if not config.off:
                ms = ms + self.drafter * self.target_ms(tokens, context) + self.pass_ms
                step = self.drafter * self.target_ms(batch * config.topk, context) + self.pass_ms
                ms = ms + max(config.num_steps - 1, 0) * step
            rows.append(ms)
        return np.stack(rows)

    def extrapolates(self, config: SpecConfig, batch: float, context: float) -> bool:
        return True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Roofline:
        return cls(**data)

    def table(
        self,
        configs: Sequence[SpecConfig],
        batches: Sequence[int],
        lengths: Sequence[int],
        provenance: Provenance,
        *,
        systematic: float = 0.0,
        noise: float = 0.0,
        seed: int = 0,
    ) -> CostTable:
        """Simulate the cost table of such a machine.

        systematic  standard deviation of a relative error per configuration, and of one per batch size (clocks, kernel
                    choices)
        noise       standard deviation of the relative error of every cell
        seed        two seeds simulate two profiles of the same machine
        """
        rng = np.random.default_rng(seed)
        by_config = np.exp(systematic * rng.standard_normal((len(configs), 1, 1)))
        by_batch = np.exp(systematic * rng.standard_normal((1, len(batches), 1)))
        cells = np.exp(noise * rng.standard_normal((len(configs), len(batches), len(lengths))))
        batch = np.array(batches)[:, None]
        length = np.array(lengths)[None, :]
        ms = self.grid(configs, batch, batch * length) * by_config * by_batch * cells
        rounds = []
        for i, config in enumerate(configs):
            for j, b in enumerate(batches):
                for k, n in enumerate(lengths):
                    median = float(ms[i, j, k])
                    spread = float(ms[i, j, k] * noise)
                    rounds.append(RoundCost(1, b, b * n, config, round(median, 6), spread, 20))
        prefill = []
        for n in sorted(set(lengths)):
            tokens = np.array(float(n))
            prefill.append(PrefillCost(1, 1, n, self.host_ms + float(self.target_ms(tokens, tokens))))
        return CostTable(provenance, rounds, prefill, switch_ms=self.switch_ms, catch_up_ms=self.catch_up_ms)
