"""What one rank of the tests of a fleet that changes its tensor-parallel size does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import embedded_oracle as oracle
import numpy as np
import torch

from megatron_rlspec.extensions.migration.embedded import member as member_module
from megatron_rlspec.extensions.migration.embedded import regroup
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet, Follower
from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.extensions.migration.embedded.member import Member
from megatron_rlspec.extensions.migration.plans.record import How
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Sample, Sampling, SpecConfig

MODEL: dict[str, Any] = {"heads": 8, "kv_heads": 4, "hidden": 32, "drafter": "close", "sharpness": 2.0}
PROMPTS = [[7, 3, 9, 4, 4, 21], [5], [11, 2], [30, 1, 1, 8, 19, 25, 6, 13, 14, 2, 9]]
LONG = Sampling(max_new_tokens=60, ignore_eos=True)
SWITCHING = oracle.Switching(SpecConfig(3), OFF, SpecConfig(2), SpecConfig(1))


class Script:
    """Changes to the next of some sizes at every decision, every fourth one without caches."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.held: list[list[str]] = []
        self.begins = False  # whether the next decision is the first of a rollout

    def decide(self, loads: Any, tp: int, cap: int) -> tuple[int, How]:
        assert tp == 1 or not self.begins, "a rollout begins at size 1"
        self.begins = False
        self.held.append(sorted(held.id for load in loads for held in load.running))
        how: How = "recompute" if len(self.held) % 4 == 3 else "kv"
        return self.sizes.pop(0) if self.sizes else tp, how


def engine(slots: int = 4096, phases: bool = False) -> Any:
    """Make the engine of one rank. `phases`: a sample drafts 3 steps where its length is in every other 8 tokens.

    Then the drafts of a sample depend on its own tokens alone, and not on the batch.
    """
    spec = SpecConfig(3) if phases else SWITCHING
    sizes: dict[str, Any] = {"max_length": 96, "max_total_tokens": slots}
    made = oracle.engine_of(*oracle.tiny(**MODEL), spec, MigratableEmbeddedEngine, version=1, **sizes)
    if phases:
        made.rounds.can_draft = lambda row: made.cache.length[row] > 1 and made.cache.length[row] // 8 % 2 == 0
    return made


def accepted(samples: list[Sample]) -> list[tuple[Any, ...]]:
    """Return the rounds, the accepted drafts and the used noise keys of samples."""
    return [(s.accepted, s.accepted_spans, s.draws) for s in samples]


def checked(engine: MigratableEmbeddedEngine, ranks: Ranks, groups: Groups, size: int, how: How) -> list[ActiveRequest]:
    """Change the size. With room for all, samples come with their caches, or wait to be computed anew."""
    drawn = regroup.regroup(engine, ranks, groups, size, how)
    assert [run.request.id for run in drawn] == sorted(run.request.id for run in drawn)
    if engine.cache.total >= 4096:
        assert not (engine.waiting if how == "kv" else engine.running), how
    return drawn


def drawn_in_two_calls(fleet: Fleet, script: Script) -> list[Sample]:
    """Draw a rollout whose last prompt comes after some changes of the size."""
    asked = oracle.requests(PROMPTS, group=3)
    decided = len(script.held) + 2
    script.begins = True
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(fleet.generate, asked[:-3], LONG)
        while len(script.held) < decided and not first.done():
            time.sleep(0.001)
        last = fleet.generate(asked[-3:], LONG)
        return first.result() + last


def scenario(meeting: str, scripts: list[list[int]], slots: int, speculation: str) -> dict[str, Any]:
    """Draw one rollout per script, with a push in the middle. Every rank says what it saw.

    speculation  "switching", by a "rule" or in "phases" of each sample
    """
    rank, size = oracle.meet(meeting)
    torch.set_num_threads(1)
    member_module.regroup = checked
    ranks, groups = Ranks(), Groups()
    for tp in (2, size):
        groups.of(tp)
    script = Script([])
    member = Member(engine(slots, speculation == "phases"), ranks, None, script, groups)
    for sizes in scripts:
        script.sizes = [*script.sizes, *sizes, 0][:-1]
    if rank:
        Follower(member)._thread.join()
        oracle.audit(member.engine.cache)
        return {"changes": [(c["from"], c["to"]) for c in member.changes], "held": script.held}
    fleet = Fleet(member, every=3)
    if speculation == "rule":
        rule = {"candidates": ["off", 1, 3], "roofline": Roofline.of_layers(2).to_json()}
        fleet.set_spec_rule(rule)
    found: dict[str, Any] = {"texts": [], "logprobs": [], "accepted": [], "changes": [], "ways": set()}
    for number in range(len(scripts)):
        samples = drawn_in_two_calls(fleet, script)
        found["texts"].append([s.tokens.tolist() for s in samples])
        found["logprobs"].append(np.concatenate([s.behaviour_logprobs for s in samples]))
        found["accepted"].append(accepted(samples))
        assert all(s.policy_versions == ((number + 1, 0, 60),) for s in samples)
        sizes = fleet.record()["sizes"]
        assert all(c["samples"] <= len(samples) for c in sizes)
        assert all(set(c) == {"began", "from", "to", "samples", "how", "ms"} for c in sizes)
        found["changes"] += [(c["from"], c["to"]) for c in sizes]
        found["ways"] |= {c["how"] for c in sizes}
        fleet.update_weights(number + 2, oracle.tiny(**MODEL)[1].items())
    found["same"] = fleet.fingerprints() == engine().fingerprints()
    found["held"] = script.held
    fleet.close()
    oracle.audit(member.engine.cache)
    return found
