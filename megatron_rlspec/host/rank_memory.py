"""Memory of a trainer rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rlspec.config import Config


@dataclass(frozen=True)
class Bytes:
    """Memory of one rank in bytes. Between steps it has no activations."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all four."""
        return self.weights + self.gradients + self.optimizer + self.activations


def kept(config: Config, world: int, itemsize: int, dense: int, experts: int = 0) -> Bytes:
    """Compute what a rank of a job of `world` ranks keeps between steps.

    itemsize        bytes of a parameter in `model.dtype`
    dense, experts  parameters on this rank: routed experts, and all others
    """
    replicas = world // (config.parallel.tensor * config.parallel.pipeline)
    stepped = dense + experts
    if config.optimizer.distributed:
        stepped = dense // replicas + experts // (replicas // config.parallel.expert)
    exact = max(itemsize, 4)
    # two moments, and a float32 copy of 16-bit weights
    state = 2 * exact + (4 if itemsize < 4 else 0)
    return Bytes(itemsize * (dense + experts), exact * (dense + experts), state * stepped)
