"""An engine on the trainer's devices sleeps while training and is given all weights when it wakes."""

import forked
import pytest
from short_run import TESTS, make_start, words

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_start(tmp_path_factory.mktemp("start"))


def calls_of(start, run_dir, command, options):
    """Return the calls of a run with SGLang's engine on a CPU: its release and resume run, but free no memory there."""
    options |= {"rollout.restarts": 0, "health.canary_prompts": 0, "train.eval_prompts": 1}
    ended = forked.run_module("colocated_run", words(start, run_dir, command, options), folder=TESTS)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    return [line.removeprefix("CALL ") for line in output.splitlines() if line.startswith("CALL ")]


def test_the_order_of_calls_in_a_run(start, tmp_path):
    calls = calls_of(start, tmp_path / "run", "train", {"train.steps": 2})
    step = ["generate", "sleep", "train_step", "wake", "update_weights", "fingerprints"]
    evaluation = ["generate"]
    assert calls == ["update_weights", "fingerprints", *evaluation, *step, *step, *evaluation]
    assert "policy/skipped" in (tmp_path / "run/metrics.jsonl").read_text()


def test_a_warm_start_lets_engines_sleep_over_several_steps(start, tmp_path):
    options = {"sft.path": start / "task/train.jsonl", "sft.steps": 3, "sft.samples_per_step": 4, "sft.eval_every": 2}
    calls = calls_of(start, tmp_path / "run", "sft", options | {"sft.eval_prompts": 1})
    evaluation = ["wake", "update_weights", "fingerprints", "generate"]
    assert calls == ["sleep", "train_step", "train_step", *evaluation, "sleep", "train_step"]
