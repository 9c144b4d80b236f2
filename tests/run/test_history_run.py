"""Runs with `spec.history`: the policy is that of a run without old answers."""

import numpy as np
import pytest
import torch
from short_run import make_start, run

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.history import History
from megatron_rlspec.types import Group, OpenGroup, Prompt, Request

# Without tis_clip the engine's log-probs, whose rounding follows the batch, do not reach the policy. An epoch: 4 steps.
# Of the four answers to a prompt two or more begin alike, because each token is one of two.
OPTIONS = {
    "spec__mode": "fixed",
    "algorithm__tis_clip": 0,
    "rollout__top_k": 2,
    "train__eval_prompts": 1,
    "train__steps": 9,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = make_start(tmp_path_factory.mktemp("start"))
    rows = (folder / "task/rl.jsonl").read_text().splitlines()
    (folder / "task/rl.jsonl").write_text("\n".join(rows[:16]) + "\n")
    return folder


def policy(run_dir) -> dict[str, torch.Tensor]:
    return dict(read_hf(run_dir / "hf")[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_old_answers_leave_the_policys_bits(start, tmp_path, engine):
    options = OPTIONS | {"rollout__engine": engine}
    run(start, tmp_path / "without", **options)
    run(start, tmp_path / "with", **options, spec__history="true")
    expected = policy(tmp_path / "without")
    assert [name for name, t in policy(tmp_path / "with").items() if not torch.equal(t, expected[name])] == []
    repeated = 0
    for plain, record in zip(*(read_records(tmp_path / n / "metrics.jsonl") for n in ("without", "with")), strict=True):
        assert record["rollout/reward"] == plain["rollout/reward"]
        assert record["rollout/response_tokens"] == plain["rollout/response_tokens"]
        old = record["rollout/old_tokens"]
        assert (old > 0) == (record["step"] >= 4) and "rollout/old_tokens" not in plain
        assert record["rollout/repeated_tokens"] <= old
        repeated += record["rollout/repeated_tokens"]
        assert ("predict/error" in record) == (record["step"] > 0 and not old), record["step"]
        assert ("predict/error" in plain) == (record["step"] > 0)
    assert repeated > 0


def answers(prompt: Prompt, *texts: list[int]) -> Group:
    requests = [Request(f"p{prompt.id}-n{i}", prompt, seed=i) for i in range(len(texts))]
    samples = [r.sample("finished", text, np.zeros(len(text))) for r, text in zip(requests, texts, strict=True)]
    return Group(prompt, samples)


def test_a_request_gets_the_beginning_that_old_answers_to_its_prompt_share():
    prompts = Prompt(1, np.array([7])), Prompt(2, np.array([8]))
    asked = [OpenGroup([Request(f"p{prompt.id}", prompt, seed=9)]) for prompt in prompts]
    first = [answers(prompts[0], [5, 6, 7], [5, 6, 8]), answers(prompts[1], [1, 2], [3, 4])]

    def drafts() -> list[list[int] | None]:
        found = [group.requests[0].draft for group in history.attached(asked)]
        return [None if draft is None else draft.tolist() for draft in found]

    history = History(load(None, {"spec.history": "true"}))
    assert drafts() == [None, None]
    assert history.keep(0, first) == {"old_tokens": 0, "repeated_tokens": 0}
    assert drafts() == [[5, 6], None]
    second = [answers(prompts[0], [5, 6, 9], [5, 1], [5]), answers(prompts[0], [6])]
    assert history.keep(1, second) == {"old_tokens": 8, "repeated_tokens": 4}
    assert drafts() == [[5], None]
    without = History(load(None, {}))
    assert without.keep(0, first) == {} and without.attached(asked) is asked


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"spec.verifier": "target_only"}, "spec.history"),
        ({"rollout.function": "tool:use"}, "one reply"),
        ({"spec.mode": "off"}, "spec.history"),
    ],
)
def test_what_old_answers_cannot_draft_is_refused_in_one_line(options, line):
    asked = {"spec.history": "true"}
    assert load(None, asked).spec.history
    with pytest.raises(ConfigError, match=line):
        load(None, asked | options)
