"""Ranks of `test_slime_routing.py`: one step of slime on a mixture of experts, replaying recorded routing."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import slime_ranks
import torch
import torch.distributed as dist

MICRO_BATCHES = 2


def on_this_machine():
    """Record in plain memory: slime pins it, which needs a GPU."""
    from slime.utils.routing_replay import RoutingReplay

    RoutingReplay.record = lambda self, chosen: self.top_indices_list.append(chosen.clone())


def routers(model):
    """Return the routers of the trunk and of the drafter, by name."""
    found = {n: m for n, m in model[0].named_modules() if n.endswith(".mlp.router")}
    return [{n: m for n, m in found.items() if (".mtp." in n) == drafter} for drafter in (False, True)]


def choices(seen, router, name):
    """Note which experts `router` uses, and which it would use without a recording."""

    def hook(module, inputs, outputs):
        logits = module.gating(inputs[0].detach()).view(-1, module.config.num_moe_experts)
        scores = logits.sigmoid() + module.expert_bias
        own = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(module.topk, 1).indices, True)
        seen.append((name, outputs[1].detach().clone(), own))

    router.register_forward_hook(hook)


def replayed(folder, cp, drafter, *extra):
    """Train a step whose trunk replays what rollouts recorded: here experts that it would not have chosen.

    slime's own `fill_routing_replay` hands the recordings to the routers.
    """
    os.environ |= {"ENABLE_ROUTING_REPLAY": "1", "ROUTING_REPLAY_STAGE": "fallthrough"}
    slime_ranks.HF_CONFIG["architectures"] = ["Glm4MoeForCausalLM"]
    args, model, optimizer, scheduler = slime_ranks.prepare(folder, int(cp), " ".join(extra), drafter == "drafter")
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.utils.routing_replay import RoutingReplay

    on_this_machine()
    data = slime_ranks.rollout_data()
    generator = torch.Generator().manual_seed(11)
    data["rollout_routed_experts"] = [
        torch.rand(len(tokens) - 1, args.num_layers, args.num_experts, generator=generator)
        .topk(args.moe_router_topk)
        .indices
        for tokens in data["tokens"]
    ]
    actor = SimpleNamespace(args=args, model=model)
    MegatronTrainRayActor.fill_routing_replay(actor, get_data_iterator(data), [MICRO_BATCHES], data)
    seen = []
    for found in routers(model):
        for name, router in found.items():
            choices(seen, router, name)
    gradients = slime_ranks.capture(model, optimizer)
    os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"  # as slime's actor sets it for training
    losses, norm = slime_ranks.train_step(args, model, optimizer, scheduler)
    RoutingReplay.assert_all_consumed()
    found = {"parameters": slime_ranks.parameters(model), "norm": norm, "losses": losses, "choices": seen}
    found |= {"gradients": gradients, "stage": os.environ["ROUTING_REPLAY_STAGE"]}
    found["recorded"] = [x.clone() for r in RoutingReplay.all_routing_replays for x in r.top_indices_list]
    torch.save(found, Path(folder, f"rank{dist.get_rank()}.pt"))


if __name__ == "__main__":
    replayed(*sys.argv[2:])
