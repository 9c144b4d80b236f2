"""A run that is killed at a random moment and resumed ends with the same bytes as a run that was not killed.

pytest -m slow -s tests/run/test_killed.py     # prints the kills of each combination; RLSPEC_KILLS is their number (4)
"""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_job import Job, await_nothing_left, check_same, check_same_samples, forget
from short_run import TESTS, run, train

from megatron_rlspec.conversion.drafter_files import make_drafter
from megatron_rlspec.records.recorder import read_records

# The embedded engine, because it starts fast. Drafts change no token, but the last bits of the engine's log-probs,
# which weigh a gradient unless tis_clip=0. An adaptive rule starts over after a kill.
OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1}
AHEAD = {"rollout__staleness": 1, "algorithm__kl_coef": 0.1}
SEVERAL = {"train__updates_per_rollout": 2}
PARTIAL = {"rollout__partial": 1, "rollout__max_new_tokens": 48}
ADAPTIVE = {"spec__mode": "adaptive", "algorithm__tis_clip": 0}
RECORD = {"train__record_gib": 1}
BUFFER = {"drafter__replay": "uniform", "drafter__reward_weight": "reward"}
# SGLang's log-probs depend in their last bits on what is decoded together, and so on time.
SGLANG = {"rollout__engine": "sglang", "rollout__engines": 2, "algorithm__tis_clip": 0}
SAME_POLICY = {
    "optimizer__lr": 1e-30,
    "optimizer__warmup_steps": 0,
}  # changes no weight, so no text depends on the order
# One number of drafts: the choice between several depends on the machine.
CHOSEN = {"spec__mode": "adaptive", "spec__ragged": "true", "spec__candidate_steps": "3"}
MOVES = {"tail__rebalance": "true", "tail__every": 4}
COMBINATIONS: dict[str, tuple[int, dict[str, object]]] = {  # ranks, each of which has an engine, and options
    "staleness, KL, two updates, record": (1, AHEAD | SEVERAL | RECORD),
    "adaptive, dynamic sampling": (1, ADAPTIVE | {"algorithm__dynamic_sampling": "true"}),
    "partial, staleness, buffer by reward": (1, PARTIAL | AHEAD | {"drafter__replay": "reward", "rollout__partial": 3}),
    "two engines, moves, record": (2, MOVES | RECORD),
    "overlap, two updates, buffer, reward weight, record": (
        1,
        BUFFER | SEVERAL | RECORD | {"drafter__overlap": "true"},
    ),
    "EAGLE-3, staleness, every third update, top-k": (
        1,
        AHEAD
        | {"drafter__kind": "eagle3", "drafter__loss": "forward_kl", "drafter__update_every": 3}
        | {"rollout__temperature": 0.7, "rollout__top_k": 20},
    ),
    "two engines, partial, staleness": (2, PARTIAL | AHEAD),
    "partial, chosen drafts": (1, PARTIAL | CHOSEN | RECORD | SAME_POLICY),
    "two SGLang engines, partial": (1, SGLANG | PARTIAL | RECORD | SAME_POLICY | {"algorithm__tis_clip": 2.0}),
}
STEPS = 40
KILLS = int(os.environ.get("RLSPEC_KILLS", "4"))
SLOW = (pytest.mark.slow, pytest.mark.timeout(7200))


@pytest.mark.slow
def test_killed_as_a_user_starts_it_and_resumed_ends_with_the_same_bytes(start, tmp_path):
    """`python -m megatron_rlspec.cli`; the other cases fork the run from a process that has imported the package."""
    options = OPTIONS | AHEAD | {"train__steps": 12}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(start, whole, **options)
    killed.mkdir()
    process = train(start, killed, train__resume="true", **options)
    while len(read_records(killed / "metrics.jsonl")) < 3:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 < len(read_records(killed / "metrics.jsonl")) < 12
    run(start, killed, train__resume="true", **options)
    check_same(whole, killed, 12)
    records = read_records(killed / "metrics.jsonl")
    assert [r["policy/staleness"] for r in records] == [0.0] + [1.0] * 11
    kl = [r["policy/kl_loss"] for r in records]  # to the first policy, which no checkpoint has
    assert kl[0] == 0 and min(kl[2:]) > 0


@pytest.mark.slow
def test_killed_between_two_updates_and_resumed_ends_with_the_same_bytes(start, tmp_path):
    """The rollout whose first update was lost is trained on from its beginning."""
    options = OPTIONS | SEVERAL | {"train__steps": 4}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(start, whole, **options)
    process = train(start, killed, program=TESTS / "dying_update.py", **options)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL and len(read_records(killed / "metrics.jsonl")) == 2
    run(start, killed, train__resume="true", **options)
    check_same(whole, killed, 4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in COMBINATIONS])
def test_killed_at_random_moments_and_resumed_ends_with_the_same_bytes(start, tmp_path, monkeypatch, name):
    """Every third kill comes after a second in which the process stood still."""
    ranks, settings = COMBINATIONS[name]
    options = OPTIONS | settings | {"train__steps": STEPS}
    if "EAGLE-3" in name:
        make_drafter(start / "model", tmp_path / "drafter", 24)
        options["drafter__path"] = tmp_path / "drafter"
    if "moves" in name or "chosen" in name:
        options["module"] = "given_costs"
        monkeypatch.setenv("RIDGE", "16" if "chosen" in name else "1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    temporary = Path(tempfile.mkdtemp())  # not below tmp_path, whose name is too long for sockets
    monkeypatch.setenv("TMPDIR", str(temporary))
    run(start, whole, ranks=ranks, **options)
    killed.mkdir()
    moments = random.Random(name)
    reached, made = [], set()
    for number in range(KILLS):
        job = Job(start, killed, ranks, **options)
        job.await_steps(moments.randint(0, 3))
        time.sleep(moments.uniform(0, 3 if "SGLang" in name else 0.3))
        if number % 3 == 2:
            job.stop(number % ranks, 1.0)
        made |= {path.name for path in temporary.iterdir()}
        job.kill(number % ranks)
        reached.append(len(read_records(killed / "metrics.jsonl")))
    assert 0 < max(reached) and reached[-1] < STEPS, reached
    run(start, killed, ranks=ranks, train__resume="true", **options)
    (check_same_samples if options.get("optimizer__lr") == 1e-30 else check_same)(whole, killed, STEPS)
    await_nothing_left(temporary, made)
    print(
        f"\n{name}: {KILLS} kills, {KILLS // 3} of them of a stopped process, after {reached} of {STEPS} steps; equal"
    )
    forget(whole, killed, temporary)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Return a file system of its own, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "rlspec", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_ends_the_run_in_one_line_and_a_larger_one_continues_it(start, tmp_path, disk):
    options = OPTIONS | AHEAD | RECORD | {"train__steps": 12}
    whole, full = tmp_path / "whole", disk / "run"
    run(start, whole, **options)
    reached = []
    for mebibytes in (2, 3, 4, 5):
        subprocess.run(["mount", "-o", f"remount,size={mebibytes}m", disk], check=True)
        output = run(start, full, code=1, train__resume="true", **options)
        (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
        assert "No space left on device" in line and "Traceback" not in output, output
        reached.append(len(read_records(full / "metrics.jsonl")))
    assert reached == sorted(reached) and reached[-1] > 0, reached
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    run(start, full, train__resume="true", **options)
    check_same(whole, full, 12)
    print(f"\nfull disk: {len(reached)} times, after {reached} of 12 steps; equal")
