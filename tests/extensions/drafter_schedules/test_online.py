"""The online learner and its replay buffer: policy and texts are the same whatever trains the drafter, and when."""

import os
from pathlib import Path

import numpy as np
import pytest
import short_run
import torch
from test_parallel_equality import PLAIN, build
from train_ranks import digest, on_ranks, samples

from megatron_rlspec import loop, wire
from megatron_rlspec.commands import training
from megatron_rlspec.extensions.drafter_schedules.replay import ReplayBuffer
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.train.drafter_updates import reward_weights
from megatron_rlspec.types import Group, Prompt, Sample

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
    names = ("every", "overlap-2")
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
def test_ranks_decide_alike_while_rank_0_draws(on_two_ranks):
    every, overlapped = on_two_ranks / "every", on_two_ranks / "overlap-2"
    assert bits(overlapped, drafter=False) == bits(every, drafter=False)
    assert texts(overlapped) == texts(every)
    assert column(overlapped, "drafter/updated")[1] == 1


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
    own_student = trainer.drafter_step.make_student

    def student(given, *args, **options):
        for depth, out in enumerate(given):
            outputs.append(out.detach().clone().requires_grad_())
            out.register_hook(lambda grad, depth=depth: found.append((depth, grad.clone())))
        return own_student(given, *args, **options)

    trainer.drafter_step.make_student = student
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


def sample(i, length=20, reward=0.0, **metadata):
    tokens = np.arange(length, dtype=np.int64) + i
    mask = (np.arange(length) >= 5).astype(np.float32)
    return Sample(
        f"s{i}",
        Prompt(i, tokens[:5], text="a question", label="an answer"),
        tokens,
        mask,
        -mask,
        policy_versions=((7, 0, length - 5),),
        reward=reward,
        text="a long text",
        metadata=metadata,
    )


def ids(samples):
    return [int(s.request_id[1:]) for s in samples]


def held(buffer):
    return ids([s for group in buffer.groups() for s in group.samples])


@pytest.mark.parametrize(("tokens", "expected"), [(109, [3, 4, 5, 6, 7]), (10, [7]), (10**9, list(range(8)))])
def test_the_oldest_samples_leave_at_the_bound(tokens, expected):
    buffer = ReplayBuffer(tokens)
    buffer.add([sample(i) for i in range(4)])
    buffer.add([sample(i) for i in range(4, 8)])
    assert held(buffer) == expected and buffer.tokens == 20 * len(expected)
    assert buffer.newest == min(4, len(expected))


def test_a_draw_has_as_many_tokens_as_the_last_rollout():
    buffer = ReplayBuffer(10**6)
    assert buffer.draw("uniform", (0,)) == []
    buffer.add([sample(i) for i in range(4)])
    buffer.add([sample(i) for i in (4, 5)])
    assert ids(buffer.draw("newest", (0,))) == [5, 4]
    assert len(buffer.draw("uniform", (0,))) == 2
    buffer.add([sample(6, 10)])
    assert len(buffer.draw("uniform", (0,))) == 1  # at least one, even if it is longer


@pytest.mark.parametrize("by", ["uniform", "reward"])
def test_draws_follow_their_weights_and_depend_on_the_seed_only(by):
    both = [sample(0, reward=3.0), sample(1, reward=1.0)]
    buffer = ReplayBuffer(10**6)
    for one in both:  # so that a draw has one sample
        buffer.add([one])
    first = [ids(buffer.draw(by, (1, n)))[0] for n in range(2000)]
    expected = {"uniform": 1 / 2, "reward": 3 / 4}[by]
    assert np.mean(np.array(first) == 0) == pytest.approx(expected, abs=0.03)
    assert first[:50] == [ids(buffer.draw(by, (1, n)))[0] for n in range(50)]
    buffer.clear()
    buffer.add(both)
    assert sorted(ids(buffer.draw(by, (1, 0)))) == [0, 1]  # without replacement


def test_a_checkpoint_restores_the_buffer_and_its_draws():
    former, later = ReplayBuffer(200), ReplayBuffer(200)
    former.add([sample(i, reward=float(i)) for i in range(12)])
    former.add([sample(i, 30, reward_error="timeout") for i in (12, 13)])
    later.restore(wire.decode(wire.encode(former.groups()), list[Group]))
    assert wire.encode(later.groups()) == wire.encode(former.groups())
    assert (later.tokens, later.newest) == (former.tokens, former.newest)
    for by in ("newest", "uniform", "reward"):
        assert ids(later.draw(by, (3,))) == ids(former.draw(by, (3,)))
    assert ReplayBuffer(200).groups() == []
    (stored,) = [s for s in later.draw("newest", (0,)) if s.request_id == "s13"]
    given = sample(13, 30)
    assert np.array_equal(stored.tokens, given.tokens) and stored.prompt_len == 5 and stored.text == ""
    assert np.array_equal(stored.loss_mask, given.loss_mask != 0) and stored.policy_versions == ((7, 0, 25),)
    assert np.array_equal(stored.behaviour_logprobs, given.behaviour_logprobs)
