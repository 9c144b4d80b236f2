"""Cost tables of GPUs by their data sheets: a roofline, and all-reduces between the GPUs of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline, Work
from megatron_rlspec.types import OFF, SpecConfig

BATCHES = tuple(2**i for i in range(11))
LENGTHS = tuple(2**i for i in range(5, 18, 2))
PREFILLS = (1, 256, 1024, 4096, 16384)
STEPS = (1, 2, 3, 5, 7)  # of the chains in a table
PCIE = (8.3, 0.0134)  # what PAT's figure 4 implies for eight A40: docs/papers.md
NVLINK = (300.0, 0.003)  # assumed
# Of an all-reduce between the GPUs of one engine: GB/s, and ms for every GPU after the first.
WIRES = dict.fromkeys(("A40", "L40S"), PCIE) | dict.fromkeys(
    ("A100", "H100", "H20", "H200"), NVLINK
)


@dataclass(frozen=True)
class ModelSizes:
    """A model's size, in bf16.

    parameters     of the whole model
    context_bytes  of one token's keys and values in all layers, over all GPUs of an engine
    drafter        duration of a drafter pass, as a share of a target pass
    """

    parameters: float = 8e9
    context_bytes: float = 131_072.0
    layers: int = 32
    hidden: int = 4096
    drafter: float = 0.1

    @property
    def bytes(self) -> float:
        return 2 * self.parameters


def hardware_table(
    gpu: str,
    model: ModelSizes,
    tps: Sequence[int],
    steps: Sequence[int] = STEPS,
    trees: Sequence[SpecConfig] = (),
) -> CostTable:
    """Return the cost table of engines of `tps` GPUs each, computed: no engine ran.

    An engine of n GPUs reads and computes n times as fast, and adds two all-reduces a layer (Megatron-LM, 2019).
    """
    configs = [OFF, *(SpecConfig(k) for k in steps), *trees]
    provenance = Provenance("roofline", gpu, "bf16", "none", "", "", True, "data sheet")
    rounds: list[RoundCost] = []
    prefill: list[PrefillCost] = []
    for tp in tps:
        cost = _roofline(gpu, model, tp)
        for batch in BATCHES:
            contexts = batch * np.array(LENGTHS)
            ms = cost.grid(configs, np.array(batch), contexts)
            for config, row in zip(configs, ms, strict=True):
                wires = _wires_ms(gpu, model, tp, Work.of([config], np.array(batch), contexts))
                rounds += [
                    RoundCost(tp, batch, int(context), config, float(value) + wires)
                    for context, value in zip(contexts, row, strict=True)
                ]
        for tokens in PREFILLS:
            n = np.array(float(tokens))
            ms_alone = cost.host_ms + float(cost.target_ms(n, n)) * (1 + model.drafter)
            prefill.append(
                PrefillCost(tp, 1, tokens, ms_alone + _all_reduces_ms(gpu, model, tp, tokens))
            )
    return CostTable(
        provenance, rounds, prefill, catch_up_ms=_roofline(gpu, model, tps[0]).catch_up_ms
    )


def _roofline(gpu: str, model: ModelSizes, tp: int) -> Roofline:
    bandwidth, tflops = (tp * value for value in HARDWARE[gpu])
    return Roofline.of_hardware(
        bandwidth,
        tflops,
        parameters=model.parameters,
        context_bytes=model.context_bytes,
        drafter=model.drafter,
    )


def _wires_ms(gpu: str, model: ModelSizes, tp: int, work: Work) -> float:
    """Return the ms of all all-reduces of a round: of the target, and of the drafter's one layer a pass."""
    verified, drafts, passes, step = (float(np.ravel(x)[0]) for x in (work.verified, *work[2:]))
    layer = replace(model, layers=1)
    target = _all_reduces_ms(gpu, model, tp, verified) + drafts * _all_reduces_ms(
        gpu, layer, tp, verified
    )
    return target + passes * _all_reduces_ms(gpu, layer, tp, step)


def _all_reduces_ms(gpu: str, model: ModelSizes, tp: int, tokens: float) -> float:
    rate, hop_ms = WIRES[gpu]
    size = 2 * (tp - 1) / tp * model.hidden * 2 * tokens  # bytes that a GPU sends, in a ring
    return 2 * model.layers * (hop_ms * (tp - 1) + size / rate / 1e6)
