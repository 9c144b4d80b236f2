"""The online learner in whole runs: the policy and its texts are the same whatever trains the drafter, and when."""

import os
from pathlib import Path

import pytest
import short_run
import torch
from test_parallel_equality import PLAIN, build
from train_ranks import digest, on_ranks, samples

from megatron_rlspec import loop
from megatron_rlspec.commands import training
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.train.drafter_updates import reward_weights

# With tis_clip the engines' log-probs weigh the policy's loss. Their last bits depend on how many tokens a round
# verified, and so on the drafts.
COMMON = {"rollout__engine": "embedded", "spec__mode": "fixed", "algorithm__tis_clip": 0, "train__save_every": 0}
COMMON |= {"train__steps": 3, "spec__num_steps": 3, "drafter__lr": 0.02, "drafter__warmup_steps": 0}
LEARNERS = {
    "every": {},
    "none": {"drafter__train": "false"},
    "every-2": {"drafter__update_every": 2},
    "by-reward": {"drafter__loss": "ce", "drafter__reward_weight": "reward", "drafter__share": 0.5},
    "overlap": {"drafter__overlap": "true"},
    "overlap-2": {"drafter__overlap": "true", "drafter__replay": "uniform", "drafter__update_every": 2},
}
SAME = [name for name in LEARNERS if name != "every"]


def trained(start, folder, variants):
    """Run `rlspec train` once per variant in this process, as one rank of the job."""
    os.chdir(short_run.TESTS)  # where the reward's module is
    for name, options in variants.items():
        common = COMMON if "drafter__train" not in options else {k: v for k, v in COMMON.items() if "drafter" not in k}
        words = short_run.words(start, folder / name, "train", common | options)
        config = training.parse("train", words[1:])
        loop.train(config, extensions=training.extensions(config))


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    on_ranks(1, trained, start, folder, LEARNERS)
    return folder


@pytest.fixture(scope="module")
def on_two_ranks(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    names = ("every", "overlap", "overlap-2")
    on_ranks(2, trained, start, folder, {name: LEARNERS[name] for name in names})
    return folder


def bits(run: Path, *, drafter: bool) -> str:
    tensors = read_hf(run / "hf")[1]
    return digest(tensors[name] for name in sorted(tensors) if (".mtp_layers." in name) == drafter)


def column(run: Path, name: str) -> list[float | None]:
    return [record.get(name) for record in read_records(run / "metrics.jsonl")]


def texts(run: Path) -> list[str]:
    return [row["response"] for row in read_records(run / "samples.jsonl")]


@pytest.mark.parametrize("name", SAME)
def test_policy_and_texts_do_not_depend_on_the_learner(runs, name):
    """So no way to train the drafter can make the policy's reward collapse (ReSpec, figure 10, reports one)."""
    assert bits(runs / name, drafter=False) == bits(runs / "every", drafter=False)
    assert texts(runs / name) == texts(runs / "every") and len(texts(runs / name)) >= 12
    assert column(runs / name, "rollout/reward") == column(runs / "every", "rollout/reward")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overlap", "overlap-2"])
def test_ranks_decide_alike_while_rank_0_draws(on_two_ranks, name):
    assert bits(on_two_ranks / name, drafter=False) == bits(on_two_ranks / "every", drafter=False)
    assert texts(on_two_ranks / name) == texts(on_two_ranks / "every")
    assert column(on_two_ranks / name, "drafter/updated")[1] == 1


def test_the_learners_differ(runs):
    """Otherwise the test above would show nothing."""
    drafters = [bits(runs / name, drafter=True) for name in SAME if name != "none"]
    assert len(set(drafters)) == len(drafters)
    assert len({tuple(column(runs / name, "rollout/accept_length")) for name in SAME}) > 2


def test_records_say_when_the_drafter_was_updated(runs):
    assert column(runs / "every-2", "drafter/updated") == [1, 0, 1]
    assert column(runs / "by-reward", "drafter/updated") == [1, 1, 1]
    tokens = [column(runs / name, "drafter/tokens_1") for name in ("every", "by-reward")]
    # small steps teach all samples unless `drafter.share` is a number
    assert all(whole > part for whole, part in zip(*tokens, strict=True))
    assert [x is not None for x in column(runs / "every-2", "drafter/grad_norm")] == [True, False, True]
    assert column(runs / "overlap", "drafter/updated") == [0, 1, 1]  # nothing is stored in the first step
    assert column(runs / "overlap", "drafter/seconds_hidden")[1] > 0
    assert column(runs / "overlap-2", "drafter/updated") == [0, 1, 0]


def step_and_oracle(loss, temperature):
    """Take one step in float64. Return the drafter's loss and its gradients in the outputs, each beside the oracle's.

    The oracle has whole logits, autograd and one loop; weights are written here again.
    """
    trainer = build(PLAIN | {"loss": loss, "dtype": "float64"})
    trainer.temperature = temperature  # of the rollouts, which the drafter learns
    chosen = samples(5)
    for i, sample in enumerate(chosen):
        sample.reward = float(i)
    weights = reward_weights([sample.reward for sample in chosen])
    (batch,) = pack(chosen, depth=3, tokens_per_micro_batch=400, drafter_weights=weights)
    outputs, found = [], []
    own_student = trainer.drafter_step.student

    def student(given, *args, **options):
        for depth, out in enumerate(given):
            outputs.append(out.detach().clone().requires_grad_())
            out.register_hook(lambda grad, depth=depth: found.append((depth, grad.clone())))
        return own_student(given, *args, **options)

    trainer.drafter_step.student = student
    states = []
    trainer.policy.register_forward_hook(lambda module, given, out: states.append(out[:, 0].detach().clone()))
    head = trainer.policy.head_weight().detach().clone()
    objective = trainer.train_step([batch], objective="grpo")["drafter/objective"]

    teacher = (states[0] @ head.t() / temperature).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for d, out in enumerate(outputs):
        draft = (out @ head.t() / temperature).log_softmax(-1)
        goal = teacher.roll(-(d + 1), 0)  # rows that this wraps around have weight 0
        rows = {
            "ce": -draft[torch.arange(len(draft)), batch.drafter_labels[d]],
            "forward_kl": (goal.exp() * (goal - draft)).sum(-1),
        }[loss]
        weight = torch.zeros(len(rows), dtype=torch.float64)
        for i in range(len(chosen)):
            (at,) = (batch.sequence_ids == i).nonzero(as_tuple=True)
            of_sample = min(max(i / 2.0, 1 / 4), 4)  # the mean reward is 2
            weight[at] = of_sample
        weight = weight * batch.drafter_mask[d]
        total = total + 0.8**d * (weight * rows).sum() / weight.sum()
    total.backward()
    return (objective, float(total)), [(grad, outputs[depth].grad) for depth, grad in sorted(found, key=lambda x: x[0])]


def all_oracles(cases):
    return [step_and_oracle(*case) for case in cases]


def test_weights_and_temperature_against_whole_logits_in_float64():
    cases = [("ce", 1.0), ("ce", 2.0), ("forward_kl", 0.5), ("forward_kl", 2.0)]
    (found,) = on_ranks(1, all_oracles, cases)
    for (loss, gradients), case in zip(found, cases, strict=True):
        assert loss[0] == pytest.approx(loss[1], rel=1e-6), case  # weights are float32
        assert len(gradients) == 3
        for ours, theirs in gradients:
            scale = theirs.abs().max()
            assert scale > 0 and (ours - theirs).abs().max() < 1e-6 * scale, case
