"""An EAGLE-3 drafter inside slime: a model of its own, which slime does not know, beside slime's policy.

It reads the inputs of several layers of the policy. It is loaded from `rlspec_path`, and then from slime's checkpoints,
which get its weights, its moments, and a Hugging Face directory `hf_drafter` that engines can be started with. A push
sends its tensors behind `PREFIX`, after the policy's.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_rlspec.conversion import drafter_files
from megatron_rlspec.conversion.eagle3 import check_drafter
from megatron_rlspec.integrations.slime.drafter import Options, SlimeDrafter
from megatron_rlspec.integrations.slime.engines import described
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import publish
from megatron_rlspec.train import shards
from megatron_rlspec.train.drafter import Drafter, Eagle3Drafter
from megatron_rlspec.train.model import Taps, taps_of


class SlimeEagle3(SlimeDrafter):
    """The drafter of one rank. All layers of the policy must be on this pipeline stage."""

    def __init__(self, model: GPTModel, options: Options, args: Namespace) -> None:
        self.hf_config = described(args.hf_checkpoint, options.path)
        check_drafter(options.path, self.hf_config, args.hf_checkpoint)
        self._tensors = drafter_files.read_drafter(options.path)
        self.table = shards.family(self.hf_config)
        self.ids = drafter_files.words(self._tensors, self.hf_config)
        self.taps = Taps(model, taps_of(self.hf_config))
        self._seed = args.seed
        # a push then comes while this process' GPU memory is given away
        self._sleeps = bool(args.offload_train)
        self._copies: dict[str, Tensor] = {}
        super().__init__(model, options)

    def thaw(self) -> None:
        super().thaw()
        self._load(self._tensors)
        self.drafter_step.head = self.block.head
        self.drafter_step.words = self.ids
        self.keep()

    def read(self, folder: Path) -> None:
        """Load the weights that `write` wrote, of a checkpoint without moments."""
        self._load(drafter_files.read_drafter(folder / drafter_files.HF_DRAFTER))

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        shards.load(self.table, [self.block], self.block.config, tensors)
        if self.learner is not None:
            self.learner.optimizer.reload_model_params()

    def build(self) -> Drafter:
        own = replace(self.model.config, calculate_per_token_loss=True)
        taps = len(taps_of(self.hf_config))
        drafter = Eagle3Drafter(
            own, self.hf_config[DRAFTER], taps=taps, depth=self.options.depth, seed=self._seed
        )
        return drafter.to(next(self.model.parameters()).device)

    def inputs(self, hidden: Tensor) -> Tensor:
        return self.taps()

    def wants(self, mtp: Any) -> bool:
        return self.fields is not None

    def step(self) -> dict[str, float]:
        metrics = super().step()
        self.keep()
        return metrics

    def keep(self) -> None:
        """Copy the weights to the host if pushes cannot read them on the device. Call it after every change."""
        if self._sleeps:
            self._copies = {
                n: p.detach().cpu()
                for n, p in shards.global_names(self.block, self.block.config).items()
            }

    def layout(self) -> dict[str, Any]:
        words = zlib.crc32(self.ids.numpy().tobytes())
        return {
            "drafter": f"EAGLE-3 of the layers {list(taps_of(self.hf_config))} and the words {words:08x}"
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors that a push sends, on every rank; collective over tensor-parallel ranks."""
        held = self._copies or shards.global_names(self.block, self.block.config)
        return shards.whole(self.table, held, next(self.model.parameters()).device)

    def write(self, folder: Path, main: bool) -> None:
        """Write `folder/hf_drafter` on the `main` rank, as `drafter.path` was; collective."""
        tensors = [(name, tensor.cpu()) for name, tensor in self.tensors()]
        if main:
            target = folder / drafter_files.HF_DRAFTER
            config = self.hf_config[DRAFTER]
            built = drafter_files.build_drafter(
                target, config, tensors, self.ids, self.options.path
            )
            publish(built, target, replace=True)
