"""An engine on the trainer's devices sleeps while training and is given all weights when it wakes."""

import forked
import pytest
from short_run import TESTS, make_start, words

pytestmark = pytest.mark.slow


def test_the_order_of_calls_in_a_run(tmp_path):
    """SGLang's engine on a CPU: its release and resume run, but free no memory there."""
    start = make_start(tmp_path / "start")
    options = {"train.steps": 2, "rollout.restarts": 0, "health.canary_prompts": 0, "train.eval_prompts": 1}
    ended = forked.run_module("colocated_run", words(start, tmp_path / "run", "train", options), folder=TESTS)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    calls = [line.removeprefix("CALL ") for line in output.splitlines() if line.startswith("CALL ")]
    step = ["generate", "sleep", "train_step", "wake", "update_weights", "fingerprints"]
    evaluation = ["generate"]
    assert calls == ["update_weights", "fingerprints", *evaluation, *step, *step, *evaluation]
    assert "policy/skipped" in (tmp_path / "run/metrics.jsonl").read_text()
