"""An EAGLE-3 drafter inside slime: a model of its own, which slime does not know, beside slime's policy.

It reads the inputs of several layers of the policy. It is loaded from `--drafter.path`, then from slime's checkpoints,
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
from megatron_rlspec.integrations.slime.drafter import SlimeDrafter
from megatron_rlspec.integrations.slime.engines import described
from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import publish
from megatron_rlspec.train import shards
from megatron_rlspec.train.drafter import Drafter, Eagle3Drafter
from megatron_rlspec.train.model import Taps, taps_of


class SlimeEagle3(SlimeDrafter):
    """The drafter of one rank. All layers of the policy must be on this pipeline stage."""

    def __init__(self, model: GPTModel, options: Options, args: Namespace) -> None:
        path = options.drafter.path
        self.hf_config = described(args.hf_checkpoint, path)
        check_drafter(path, self.hf_config, args.hf_checkpoint)
        self._published = drafter_files.read_drafter(path)
        self._names = shards.family(self.hf_config)
        # token ids that it drafts from, [S]
        self._vocabulary = drafter_files.words(self._published, self.hf_config)
        self._layers = taps_of(self.hf_config)
        self._hidden_states = Taps(model, self._layers)
        self._seed = args.seed
        # A push then comes while this process' GPU memory is given away.
        self._pushes_from_host = bool(args.offload_train)
        self._copies: dict[str, Tensor] = {}
        super().__init__(model, options, args)

    def thaw(self) -> None:
        super().thaw()
        self._load(self._published)
        self.drafter_step.head = self.block.head
        self.drafter_step.words = self._vocabulary
        self.copy_weights()

    def build(self) -> Drafter:
        drafter = Eagle3Drafter(
            replace(self.model.config, calculate_per_token_loss=True),
            self.hf_config[DRAFTER],
            taps=len(self._layers),
            depth=self.settings.depth,
            seed=self._seed,
        )
        return drafter.to(next(self.model.parameters()).device)

    def inputs(self, hidden: Tensor) -> Tensor:
        return self._hidden_states()

    def learns_from(self, mtp: Any) -> bool:
        return self.fields is not None

    def step(self) -> dict[str, float]:
        metrics = super().step()
        self.copy_weights()
        return metrics

    def copy_weights(self) -> None:
        """Copy the weights to the host if pushes cannot read them on the device. Call it after every change."""
        if not self._pushes_from_host:
            return
        parameters = shards.global_names(self.block, self.block.config)
        self._copies = {name: p.detach().cpu() for name, p in parameters.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors that a push sends, on every rank; collective over tensor-parallel ranks."""
        parts = self._copies or shards.global_names(self.block, self.block.config)
        return shards.whole(self._names, parts, next(self.model.parameters()).device)

    def layout(self) -> dict[str, Any]:
        ids = zlib.crc32(self._vocabulary.numpy().tobytes())
        return {"drafter": f"EAGLE-3 of the layers {list(self._layers)} and the words {ids:08x}"}

    def write(self, folder: Path, main: bool) -> None:
        """Write `folder/hf_drafter` on the `main` rank, as `drafter.path` was; collective."""
        tensors = [(name, tensor.cpu()) for name, tensor in self.tensors()]
        if not main:
            return
        target = folder / drafter_files.HF_DRAFTER
        built = drafter_files.build_drafter(
            target, self.hf_config[DRAFTER], tensors, self._vocabulary, self.settings.path
        )
        publish(built, target, replace=True)

    def read(self, folder: Path) -> None:
        """Load the weights that `write` wrote, of a checkpoint without moments."""
        self._load(drafter_files.read_drafter(folder / drafter_files.HF_DRAFTER))

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        shards.load(self._names, [self.block], self.block.config, tensors)
        if self.learner is not None:
            self.learner.optimizer.reload_model_params()
