"""An EAGLE-3 drafter inside slime: a model of its own, which slime does not know, beside slime's policy.

It is loaded from `--drafter.path`, and in a resumed run from slime's checkpoint, into which `hooks.py` writes its
weights, its moments, and a Hugging Face directory `hf_drafter` that engines can be started with. A push also sends
its tensors, with `models.config.PREFIX` before their names.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_rlspec.conversion import drafter_files
from megatron_rlspec.conversion.eagle3 import check_drafter
from megatron_rlspec.cotrainer.drafter import DrafterBeside
from megatron_rlspec.integrations.slime.drafter import slime_objective
from megatron_rlspec.integrations.slime.engines import hf_config_of
from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import publish
from megatron_rlspec.train import shards

HF_DRAFTER = "hf_drafter"  # within `hooks.FOLDER`


class SlimeEagle3(DrafterBeside):
    """The drafter of one rank. Every rank has one; `DrafterBeside` says what the pipeline stages do.

    `hooks.py` makes it and calls `tensors` in every push, `write` at a save, and `copy_weights` or `read` after a load.
    Raises CheckpointError for a drafter that does not fit the policy.
    """

    def __init__(self, model: GPTModel, options: Options, args: Namespace) -> None:
        path = options.drafter.path
        hf_config = hf_config_of(args.hf_checkpoint, path)
        check_drafter(path, hf_config, args.hf_checkpoint)
        # With --offload-train a push comes while this process's GPU memory is given away. Pushes then read a copy of
        # the weights on the host.
        self._pushes_from_host = bool(args.offload_train)
        self._copies: dict[str, Tensor] = {}  # by canonical name; {}: pushes read the parameters
        super().__init__(
            model,
            options.drafter,
            slime_objective(options, args),
            hf_config,
            drafter_files.read_drafter(path),
            temperature=args.rollout_temperature,
            clip_grad=args.clip_grad,  # slime clips the norm of the policy's gradient without the drafter's
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """As `DrafterBeside.load`; also refreshes the copy that pushes read."""
        super().load(tensors)
        self.copy_weights()

    def end_step(self) -> dict[str, float]:
        """As `DrafterBeside.end_step`; also refreshes the copy that pushes read."""
        metrics = super().end_step()
        self.copy_weights()
        return metrics

    def copy_weights(self) -> None:
        """Copy the weights to the host if pushes cannot read them on the device.

        Call it after every change of the weights: otherwise the next push sends the old ones.
        """
        if not self._pushes_from_host:
            return
        parameters = shards.global_names(self.block, self.model.config)
        self._copies = {name: p.detach().cpu() for name, p in parameters.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of all that a push sends, on every rank and on its device.

        Collective: every rank must read the iterator to its end.
        """
        parts = self._copies or shards.global_names(self.block, self.model.config)
        device = next(self.model.parameters()).device
        return shards.gather_tensors(self.table, parts, self.model.config, device)

    def write(self, folder: Path, main: bool) -> None:
        """Write the directory `folder/hf_drafter` on the `main` rank, in the form of `drafter.path`; collective."""
        tensors = [(name, tensor.cpu()) for name, tensor in self.tensors()]
        if not main:  # this rank has taken part in `tensors`, and has nothing to write
            return
        assert self.vocabulary is not None
        target = folder / HF_DRAFTER
        built = drafter_files.build_drafter(
            target, self.hf_config[DRAFTER], tensors, self.vocabulary, self.settings.path
        )
        publish(built, target, replace=True)

    def read(self, folder: Path) -> None:
        """Load the weights that `write` wrote, of a checkpoint without moments; the optimizer's state begins anew."""
        self.load(drafter_files.read_drafter(folder / HF_DRAFTER))
