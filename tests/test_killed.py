"""A run that is killed at a random moment and resumed ends with the same bytes as a run that was not killed."""

import random
import signal
import time
from pathlib import Path

import pytest
from short_run import run, train

from megatron_rlspec.metrics import read_records

# The embedded engine, because it starts fast. Drafts change no token, but the last bits of the engine's log-probs,
# which weigh a gradient unless tis_clip=0. An adaptive rule starts over after a kill.
OPTIONS = {"rollout__engine": "embedded", "train__eval_prompts": 1}
FIXED = {"spec__mode": "fixed", "rollout__staleness": 0}
AHEAD = {"spec__mode": "fixed", "rollout__staleness": 1, "algorithm__kl_coef": 0.1}
PARTIAL = FIXED | {"rollout__partial": "true", "rollout__over_sampling": 7, "rollout__max_new_tokens": 48}
ADAPTIVE = {"spec__mode": "adaptive", "algorithm__tis_clip": 0, "rollout__staleness": 0}
PARTIAL_AHEAD = PARTIAL | {"rollout__staleness": 1}
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


def kill(start: Path, run_dir: Path, steps: int, seconds: float, **options: object) -> int:
    """Start or resume a run; SIGKILL it some time after more steps are recorded; return the steps that were done."""
    (run_dir / "config.json").unlink(missing_ok=True)
    upto = len(read_records(run_dir / "metrics.jsonl")) + steps
    process = train(start, run_dir, train__resume="true", **options)
    deadline = time.monotonic() + 120
    # config.json is written when the trainer is built.
    while not (run_dir / "config.json").exists() or len(read_records(run_dir / "metrics.jsonl")) < upto:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.005)
    time.sleep(seconds)
    assert process.poll() is None, "the run ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return len(read_records(run_dir / "metrics.jsonl"))


def files(run_dir: Path, steps: int) -> dict[str, bytes]:
    """Return the files of policy, drafter, both optimizers and generators, and the exported ones."""
    folders = (run_dir / f"checkpoints/step-{steps:06d}", run_dir / "hf")
    return {str(f.relative_to(run_dir)): f.read_bytes() for folder in folders for f in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("settings", "steps", "kills"),
    [
        (AHEAD, 12, 1),
        *(pytest.param(settings, 120, 20, marks=SLOW) for settings in (FIXED, AHEAD, ADAPTIVE, PARTIAL, PARTIAL_AHEAD)),
    ],
)
def test_killed_at_random_moments_and_resumed_ends_with_the_same_bytes(start, tmp_path, settings, steps, kills):
    options = OPTIONS | settings | {"train__steps": steps}
    run(start, tmp_path / "whole", **options)
    moments = random.Random(steps)
    reached = [
        kill(start, tmp_path / "killed", moments.randint(0, 3), moments.uniform(0.0, 0.4), **options)
        for _ in range(kills)
    ]
    assert max(reached) > 0 and reached[-1] < steps, reached
    run(start, tmp_path / "killed", train__resume="true", **options)
    expected = files(tmp_path / "whole", steps)
    found = files(tmp_path / "killed", steps)
    assert len(expected) >= 4 and found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    records = [read_records(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")]
    assert [r["step"] for r in records[1]] == list(range(steps))
    assert [r["rollout/reward"] for r in records[1]] == [r["rollout/reward"] for r in records[0]]
    if settings is AHEAD:
        assert [r["policy/staleness"] for r in records[1]] == [0.0] + [1.0] * (steps - 1)
        kl = [r["policy/kl_loss"] for r in records[1]]  # to the first policy, which no checkpoint has
        assert kl[0] == 0 and min(kl[2:]) > 0 and kl == [r["policy/kl_loss"] for r in records[0]]
