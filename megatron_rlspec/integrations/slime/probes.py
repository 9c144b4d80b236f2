"""Probes for known defects of the slime on the path. Each runs slime's own code with Megatron and SGLang.

A probe returns what it saw if the defect is present, None if it is absent. It raises if it cannot decide: slime's
Megatron patch is missing, or the wheel of megatron-core, which lacks `megatron.training`, comes before the checkout.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rlspec.packing.shift import drafter_targets
from megatron_rlspec.rollout.sglang.http import probes as sglang_probes


def prepare() -> None:
    """Install the CPU accelerator and operators if there is no GPU."""
    from megatron_rlspec.integrations.slime import cpu as slime_cpu

    sglang_probes.prepare()
    slime_cpu.install()


def mask_shift() -> str | None:
    """Probe the MTP loss mask: it is shifted once more than the tokens."""
    from megatron_rlspec.train import probes as megatron_probes

    megatron_probes.prepare()
    tokens = torch.arange(1, 9)
    response = 5
    batch = one_batch([tokens], [response])
    trained = trained_targets(batch)
    mask = torch.zeros(len(tokens))
    mask[-response:] = 1
    labels, masks = drafter_targets(tokens, mask, torch.tensor([0, len(tokens)]), 1)[1:]
    right = labels[0][masks[0] != 0].tolist()
    if trained == right:
        return None
    return f"response {tokens[-response:].tolist()}: slime trains the targets {trained}, an engine would draft {right}"


def one_batch(tokens: list[torch.Tensor], responses: list[int], allgather_cp: bool = False) -> dict[str, Any]:
    """Run slime's `get_batch` for one micro-batch of these samples, with every response token trained."""
    from slime.backends.megatron_utils.data import get_batch

    prepare()
    fields = {
        "tokens": tokens,
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in responses],
        "total_lengths": [len(t) for t in tokens],
        "response_lengths": responses,
    }
    iterator = SimpleNamespace(get_next=lambda keys: {key: fields.get(key) for key in keys})
    return get_batch(iterator, list(fields), pad_multiplier=4, allgather_cp=allgather_cp)


def trained_targets(batch: dict[str, Any]) -> list[int]:
    """Return the tokens that slime's Megatron trains the MTP layer to predict: those whose loss has a gradient."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from megatron_rlspec.train import probes as megatron_probes

    model = megatron_probes.tiny_model()
    seen: dict[str, torch.Tensor] = {}

    def record(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen["labels"] = labels
        seen["loss"] = torch.ones_like(labels, dtype=torch.float32, requires_grad=True)
        return seen["loss"]

    model.compute_language_model_loss = record
    arguments = megatron_probes.mtp_labels(batch["tokens"])
    if "mtp_kwargs" not in arguments:
        raise RuntimeError("slime's megatron.patch is not applied to the megatron-core on the path")
    MTPLossAutoScaler.set_loss_scale(torch.ones(1))
    inputs = megatron_probes.inputs(batch["tokens"] % megatron_probes.VOCABULARY)
    model(**inputs, **arguments, loss_mask=batch["full_loss_masks"], packed_seq_params=batch["packed_seq_params"]).mul(
        0
    ).sum().backward()
    return seen["labels"][seen["loss"].grad != 0].tolist()


def dead_accept_rate() -> str | None:
    """Probe `Sample.SpecInfo`: it reads keys of `meta_info` that SGLang does not send."""
    from slime.utils.types import Sample

    meta = sglang_probes.accept_metrics(verify=10, correct=20, tokens=30)
    info = Sample.SpecInfo()
    info.add(meta_info={**meta, "completion_tokens": 30})
    if info.spec_accept_rate:
        return None
    sent = sorted(key for key in meta if "draft" in key and "histogram" not in key)
    return f"20 of 30 drafts accepted are logged as spec_accept_rate = 0; SGLang sends {', '.join(sent)}"


def qwen3_next_swap() -> str | None:
    """Probe the converter: it swaps the halves of Qwen3-Next's `eh_proj`; Megatron and SGLang have the same order."""
    from slime.backends.megatron_utils.megatron_to_hf.qwen3_next import convert_qwen3_next_to_hf

    hidden = 4
    generator = torch.Generator().manual_seed(0)
    weight, e, h = (torch.randn(*shape, generator=generator) for shape in ((hidden, 2 * hidden), (hidden,), (hidden,)))
    ((_, fc),) = convert_qwen3_next_to_hf(SimpleNamespace(), "module.module.mtp.layers.0.eh_proj.weight", weight)
    error = float((sglang_probes.qwen3_next_projection(fc, e, h) - _megatron_projection(weight, e, h)).norm())
    return f"SGLang's projection of one token differs from Megatron's by {error:.2f}" if error > 1e-4 else None


def _megatron_projection(weight: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    from megatron_rlspec.train import probes as megatron_probes

    megatron_probes.prepare()
    layer = SimpleNamespace(
        enorm=lambda x: x, hnorm=lambda x: x, eh_proj=lambda x: (x @ weight.T, None), sequence_parallel=False
    )
    return MultiTokenPredictionLayer._concat_embeddings(layer, hidden[None, None], embedding[None, None])[0, 0]


PROBES: dict[str, Callable[[], str | None]] = {
    "slime-mask-shift": mask_shift,
    "slime-dead-accept-rate": dead_accept_rate,
    "slime-qwen3-next-swap": qwen3_next_swap,
}
