"""Parts of a run, without ranks and engines: records, batches, results, limits, resumed state, a drafter's samples."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_rlspec import __version__, loop
from megatron_rlspec.config import load
from megatron_rlspec.conversion.drafter_files import read_model
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import CheckpointError, publish, read_hf
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.records.clock import Clock
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run import checkpoints, identity, state_file
from megatron_rlspec.run.batches import mini_batches
from megatron_rlspec.run.drafter_training import Drafting, chosen_samples
from megatron_rlspec.run.engines import RunDraftRule
from megatron_rlspec.run.logprob_gap import GAP, LogprobGap
from megatron_rlspec.run.recording import Records
from megatron_rlspec.run.result import build_result
from megatron_rlspec.run.state_file import Drawn
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.types import Group, OpenGroup, Prompt, Request, RoundStats, Sample, SpecConfig


@pytest.fixture
def config(tmp_path):
    return load(None, {"data.path": "d", "train.steps": "6", "train.run_dir": str(tmp_path), "log.sinks": ""})


def test_a_resumed_run_says_where_it_is_and_counts_on(config, tmp_path):
    record = {"step": 2, "rollout/tokens_so_far": 40.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    records = Records(config, Clock(), 3, True)
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["message"] == "resumed at step 3 of 6"
    (step,) = records.steps(4)
    records.write(step, {"rollout/response_tokens": 2.0})
    assert read_records(tmp_path / "metrics.jsonl")[-1]["rollout/tokens_so_far"] == 42.0


def test_a_step_is_bad_only_if_all_its_updates_were_skipped(config, tmp_path):
    records = Records(config, Clock(), 0, True)
    bad_steps = []
    for step, values in zip(records.steps(3), ({"policy": 0.25}, {"policy": 1.0}, {"drafter": 0.25}), strict=True):
        records.write(step, {f"{side}/skipped": share for side, share in values.items()})
        bad_steps.append(records.bad_steps)
    assert bad_steps == [0, 1, 0]
    assert [event["message"] for event in read_records(tmp_path / "events.jsonl")] == [
        "step 1: loss or gradient norm of policy not finite; 25% of the step's updates skipped",
        "step 2: loss or gradient norm of policy not finite; step skipped",
        "step 3: loss or gradient norm of drafter not finite; 25% of the step's updates skipped",
    ]


@pytest.mark.parametrize(
    ("sizes", "updates", "ends"),
    [
        ([3, 1, 2, 2], 2, [4, 8]),
        ([3, 1, 2, 2, 1], 2, [6, 9]),
        ([3, 1], 5, [3, 4]),  # a replay of a run with fewer prompts
    ],
)
def test_all_samples_of_a_prompt_are_in_one_mini_batch(sizes, updates, ends):
    groups = [Group(Prompt(i, np.zeros(1, np.int64)), [None] * size) for i, size in enumerate(sizes)]
    assert mini_batches(groups, updates) == [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def test_a_drafter_that_is_not_trained_lies_in_the_result_as_it_came(start, tmp_path):
    hf_config, tensors = read_model(start / "model")
    config = load(None, {"model.path": str(start / "model"), "drafter.train": "false"})
    policy = {name: tensors[name] + 1 for name in tensors.keys() - drafter_names(hf_config)}
    loaded = SimpleNamespace(hf_config=hf_config, tensors=tensors)
    given = (config.model.path, config.drafter, loaded, lambda scope: policy.items())
    ((target, directory),) = build_result(*given, tmp_path / "hf", None).items()
    publish(directory, target)
    check_model(target, "serve", drafter=True)
    written = read_hf(target)[1]
    assert written.keys() == tensors.keys() > policy.keys()
    assert all(written[name].equal(policy.get(name, tensors[name])) for name in tensors)


@pytest.mark.parametrize("place", [-1, 0, 8 + 899])  # the last sample, and the header
def test_a_copy_of_a_model_is_the_same_and_a_change_is_seen(tmp_path, place):
    model = tmp_path / "a"
    model.mkdir()
    (model / "config.json").write_text("{}")
    content = (900).to_bytes(8, "little") + b"h" * 900 + bytes(identity.WHOLE + (1 << 20))
    (model / "model.safetensors").write_bytes(content)
    before = identity.of_model(model)
    other = shutil.copytree(model, tmp_path / "b")
    assert identity.of_model(other) == before
    changed = bytearray(content)
    changed[place] ^= 1
    (other / "model.safetensors").write_bytes(changed)
    assert identity.of_model(other) != before


def test_the_drafter_learns_the_words_of_the_checkpoint_before_the_next_rollout():
    given = []
    trainer = SimpleNamespace(config=load(), set_draft_vocabulary=lambda words: given.append(words.tolist()))
    loaded = SimpleNamespace(vocabulary=DraftVocabulary(2, 9))
    Drafting(trainer, loaded, None, {"words": {"ids": [3, 7], "counts": [1.0, 2.0]}}, (), False)
    assert given == [[3, 7]]


def group(version):
    prompt = Prompt(0, np.arange(2))
    sample = Sample("s", prompt, np.arange(4), np.ones(4), np.zeros(4), policy_versions=((version, 0, 2),))
    return Group(prompt, [sample])


def test_a_checkpoint_says_how_old_its_tokens_will_be():
    """After 5 steps version 6 trains next; with a rollout that ran ahead, begun groups end at version 7."""
    begun = OpenGroup([Request("r", Prompt(0, np.arange(2)), 1), Request("q", Prompt(0, np.arange(2)), 2)])
    assert Drawn().age(5, partial=True) == 0
    assert Drawn(begun=[begun]).age(5, partial=True) == 0, "none has a token"
    begun.samples = group(5).samples
    assert Drawn(begun=[begun]).age(5, partial=True) == 1
    assert Drawn([group(5)], begun=[begun]).age(5, partial=True) == 2
    assert Drawn([group(5)], begun=[begun]).age(5, partial=False) == 1


def test_a_run_that_drew_ahead_goes_on_with_rollout_staleness_only(config, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    path = tmp_path / "checkpoints/step-000005"
    path.mkdir(parents=True)
    values = {"step": 5, "version": __version__, "identity": {}}
    state_file.write(state_file.of(path), values, Drawn([group(5)]))
    with pytest.raises(CheckpointError, match=r"rollout\.staleness=0 and rollout\.partial=0: .* 1 versions old"):
        checkpoints.Saver(SimpleNamespace(config=config), {}).load_newest(6)
    ahead = config.model_copy(update={"rollout": config.rollout.model_copy(update={"staleness": 1})})
    trainer = SimpleNamespace(config=ahead, load=lambda path: None)
    assert len(checkpoints.Saver(trainer, {}).load_newest(6).drawn.ahead) == 1


@pytest.mark.parametrize(
    ("done", "expected"), [(0, ["first", "step-000002", "last"]), (2, ["step-000002", "last"]), (4, ["last"])]
)
def test_an_evaluation_that_was_due_when_a_run_ended_is_made_by_the_next(monkeypatch, done, expected):
    run = MagicMock(done=done)
    run.__enter__.return_value = run
    run.due = lambda every: run.done % every == 0
    run.records.steps = lambda total: iter(range(done, total))
    run.checkpoint = lambda: setattr(run, "done", run.done + 1)
    monkeypatch.setattr(loop, "Session", lambda *_, **__: run)
    loop.train(load(None, {"train.steps": "4", "train.eval_every": "2"}))
    assert [call.args[0] for call in run.evaluate.call_args_list] == expected


@pytest.mark.parametrize(
    ("options", "seen", "limit"),
    [
        ((None, "float32", False), [], 0.01),  # a wrong matrix moves it by 0.02 to 0.05
        ((None, "bfloat16", False), [0.001, 0.004, 0.04, 0.008], 0.03),
        ((None, "float32", True), [1e-7] * 3, 0.5),
        ((2.0, "float32", False), [1e-7] * 3, 2.0),
    ],
)
def test_the_limit_follows_the_type_and_what_the_run_has_seen(options, seen, limit):
    gap = LogprobGap(*options)
    for value in seen:
        gap.observe({GAP: value})
    assert gap.limit == pytest.approx(limit)
    resumed = LogprobGap(*options)
    resumed.restore(gap.seen)
    assert resumed.limit == gap.limit and len(gap.seen) <= 20


def test_first_drafts_that_are_accepted_half_as_often_make_a_canary_due(tmp_path):
    learning = Learning([0, 3], Roofline.of_layers(8))
    config = load(None, {"spec.candidate_steps": "0,3", "train.run_dir": str(tmp_path)})
    speculation = RunDraftRule(config, learning)

    def fell(refused, accepted):
        rounds = [RoundStats(SpecConfig(3), 1, 40, 200, 200.0, (refused, accepted, 0, 0))]
        speculation.learn([("a", rounds)], [], None, 1.0)
        return speculation.fell

    assert [fell(80, 120), fell(100, 100), fell(150, 50)] == [False, False, True]
    assert not fell(9, 1), "ten rounds show nothing"


@pytest.mark.parametrize(
    ("lengths", "share", "expected"),
    [
        ([25] * 32, None, 32),  # a small step: all
        ([25] * 128, None, 82),  # the floor of 2,048 tokens
        ([1000] * 128, None, 32),  # plenty: a quarter
        ([100] * 128, 0.25, 32),
        ([100], 0.1, 1),
    ],
)
def test_a_small_step_teaches_the_drafter_all_its_samples(lengths, share, expected):
    chosen = chosen_samples(lengths, share, (1, 2))
    assert chosen.sum() == expected and set(chosen) <= {0, 1}
    assert (chosen == chosen_samples(lengths, share, (1, 2))).all()
