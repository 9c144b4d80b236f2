"""Ranks of `test_slime_eagle3.py`: slime's policy with an EAGLE-3 drafter beside it."""

import sys
from pathlib import Path

import slime_ranks
import torch
import torch.distributed as dist

SAVED = 7  # number of the iteration that is saved


def own_parameters():
    from megatron_rlspec.integrations.slime import hooks as slime_hooks

    if slime_hooks._drafter is None:
        return {}
    return {name: p.detach().clone() for name, p in slime_hooks._drafter.block.named_parameters()}


def step(folder, cp, *extra):
    """Train two steps, without our hooks in `extra` without a drafter. Its gradients are not part of the policy's."""
    from megatron_rlspec.integrations.slime import hooks as slime_hooks

    args, *built = slime_ranks.prepare(folder, int(cp), " ".join(extra), drafter=False)
    before = own_parameters()
    steps = [slime_ranks.train_step(args, *built) for _ in range(2)]
    found = {"parameters": slime_ranks.parameters(built[0]), "steps": steps, "before": before}
    found["drafter"] = own_parameters()
    if slime_hooks._drafter is not None:
        found["sent"] = dict(slime_hooks._drafter.tensors())
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))


def resumed(folder, cp, *extra):
    """Two steps, slime's `save`, a third step; and the third step again from the checkpoint, in fresh models."""
    from slime.backends.megatron_utils import model as slime_model

    from megatron_rlspec.integrations.slime import hooks as slime_hooks
    from megatron_rlspec.integrations.slime.eagle3 import HF_DRAFTER
    from megatron_rlspec.models.hf_files import read_hf

    saved = Path(folder, "saved")
    options = " ".join([f"--save {saved} --save-interval 1 --no-save-optim", *extra])
    loading = slime_ranks.load_if_saved(saved)
    args, *built = slime_ranks.prepare(folder, int(cp), options, drafter=False, loading=loading)
    for _ in range(2):
        slime_ranks.train_step(args, *built)
    sent = {name: tensor.clone() for name, tensor in slime_hooks._drafter.tensors()}
    slime_model.save(SAVED, *built)
    slime_ranks.train_step(args, *built)
    found = {"through": own_parameters(), "sent": sent}
    written = Path(saved, f"iter_{SAVED:07d}", slime_hooks.FOLDER)
    config, tensors = read_hf(written / HF_DRAFTER)
    found["written"] = {name: tensors[name] for name in tensors}
    found["config"] = config
    resume = slime_ranks.resuming(folder, cp, saved, (*extra, "--no-load-optim"), drafter=False)
    built = slime_ranks.build(resume)
    found["loaded"] = own_parameters()
    slime_ranks.train_step(resume, *built)
    found["resumed"] = own_parameters()
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))


if __name__ == "__main__":
    {"step": step, "plain": step, "resumed": resumed}[sys.argv[1]](*sys.argv[2:])
