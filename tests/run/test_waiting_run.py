"""A rank that waits for another one's decision does not occupy its GPU, where an engine may be decoding."""

import forked
import pytest
from short_run import TESTS, words

OPTIONS = {
    "rollout__engine": "embedded",
    "spec__mode": "fixed",
    "train__steps": 2,
    "train__eval_prompts": 1,
    "train__record_gib": 1,
    "parallel__tensor": 2,
}


@pytest.mark.slow
def test_no_host_waits_on_the_device(start, tmp_path):
    arguments = words(start, tmp_path, "train", OPTIONS)
    ended = forked.run_module("waiting_run", arguments, folder=TESTS, ranks=2)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    waits = {line.split()[1] for line in ended.stdout.splitlines() if line.startswith("WAIT ")}
    assert waits, "the fake backend was not used"
    assert all(file.startswith(("train/", "losses/", "packing/")) for file in waits), waits
