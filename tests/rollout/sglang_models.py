"""SGLang's own model classes for every rank of an engine, in this process and without process groups.

Import it through the fixture of the same name: SGLang needs stand-ins on a machine without its compiled packages.

SGLang builds its layers from the sizes and ranks of its runtime context, so one process can build rank after rank.
The groups are empty shells: building and loading communicate nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.model_loader import loader
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import ServerArgs
from torch import Tensor, nn

from megatron_rlspec.models.families import record_of
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.scheduler.eagle3 import separate_loaders
from megatron_rlspec.rollout.sglang.scheduler.served_weights import TensorPart, joined, marks_of, named_tensors


@dataclass
class Rank:
    """The models of one rank."""

    context: Any
    target: nn.Module
    drafter: nn.Module | None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Pass all tensors to both loaders in one call, as an engine does with a bucket."""
        with runtime_context.use_context(self.context):
            for model in self.models():
                model.load_weights(tensors.items())

    def models(self) -> list[nn.Module]:
        return [self.target] if self.drafter is None else [self.target, self.drafter]

    def held(self) -> list[TensorPart]:
        return list(named_tensors(self.target, self.drafter))


def engine(
    config: Mapping[str, Any],
    folder: Path,
    tp: int,
    ep: int = 1,
    fused: int = 0,
    eagle3_config: Mapping[str, Any] | None = None,
) -> list[Rank]:
    """Build target and drafter of every rank.

    `fused`: shared experts that stand among the routed ones, as on a GPU. `eagle3_config`: that of an EAGLE-3 drafter.
    """
    for place, each in ((folder, config), (folder / "drafter", eagle3_config)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(dict(each or {})))
    files = [file for each in (config, eagle3_config) if each for file in record_of(each).sglang_files]
    for name in files:
        entries = importlib.import_module(f"sglang.srt.models.{name}").EntryClass
        for entry in entries if isinstance(entries, list) else [entries]:
            ModelRegistry.models[entry.__name__] = entry
    return [_rank(config, folder, tp, ep, rank, fused, bool(eagle3_config)) for rank in range(tp)]


def _rank(config: Mapping[str, Any], folder: Path, tp: int, ep: int, rank: int, fused: int, apart: bool) -> Rank:
    drafts = apart or bool(config.get("num_nextn_predict_layers"))
    speculative: dict[str, Any] = {"speculative_algorithm": "EAGLE"} if drafts else {}
    if apart:
        speculative = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder / "drafter")}
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype=config["torch_dtype"],
        tp_size=tp,
        ep_size=ep,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        **speculative,
    )
    place = runtime_context.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0)
    context = runtime_context.create_context(arguments, role="scheduler", ranks=place)
    with runtime_context.use_context(context):
        context.parallel.override_permanently(**_groups(context.parallel))
        target = _build(arguments, False, fused)
        drafter = _build(arguments, True, fused) if drafts else None
        if drafter is not None:
            embedding, head = target.get_embed_and_head()
            with _no_gpu_to_wait_for():
                drafter.set_embed(embedding) if apart else drafter.set_embed_and_head(embedding, head)
        if apart:
            separate_loaders(target, drafter)
    return Rank(context, target, drafter)


def _build(arguments: ServerArgs, draft: bool, fused: int) -> nn.Module:
    path = arguments.speculative_draft_model_path if draft else None
    model_config = ModelConfig.from_server_args(arguments, model_path=path, is_draft_model=draft)
    resolve = loader.resolve_shared_experts_config

    def resolved(*asked: Any) -> Any:
        return msgspec.structs.replace(resolve(*asked), num_fused_shared_experts=fused, fusion_disabled=not fused)

    loader.resolve_shared_experts_config = resolved
    scope = draft_model_build_scope() if draft else contextlib.nullcontext()
    try:
        with loader.set_default_torch_dtype(model_config.dtype), scope:
            return loader._initialize_model(model_config, loader.LoadConfig()).requires_grad_(False)
    finally:
        loader.resolve_shared_experts_config = resolve


def _groups(parallel: Any) -> dict[str, Any]:
    places: dict[str, tuple[int, int]] = {}
    for name in ("tp", "attn_tp", "moe_tp", "moe_ep"):
        places[name] = (getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size"))
    for name in ("pp", "attn_cp", "moe_dp", "world"):
        places[name] = (0, 1)
    return {f"{name}_group": _group(*place) for name, place in places.items()}


def _group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        cpu_group=None,
        device_group=None,
        ranks=list(range(size)),
        rank=rank,
    )


@contextlib.contextmanager
def _no_gpu_to_wait_for() -> Iterator[None]:
    wait = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = wait


def fingerprints(ranks: list[Rank], dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, int]:
    """Compute `served_weights.fingerprints`, with the exchange between ranks in this process."""
    held = [rank.held() for rank in ranks]
    names = [[part.name for part in parts] for parts in held]
    assert all(row == names[0] for row in names), "ranks name their tensors in different orders"
    marks = [marks_of(parts, [(dtypes or {}).get(part.name) for part in parts]) for parts in held]
    found = joined(marks, [[part.first for part in parts] for parts in held])
    assert len(set(names[0])) == len(names[0])
    return dict(zip(names[0], found, strict=True))


def expected(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}
