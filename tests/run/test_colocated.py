"""An engine on the trainer's devices sleeps while training; a rank that waits does not occupy its GPU."""

import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import forked
import pytest
from short_run import TESTS, words

from megatron_rlspec.config import load
from megatron_rlspec.engine import EngineError
from megatron_rlspec.run.engines import Engines

STARTED = ["load_hf", "_free_memory", "launch"]


def calls_of(start, run_dir, options, **environment):
    """Return the calls of a run with SGLang's engine on a CPU: its release and resume run, but free no memory there."""
    arguments = words(start, run_dir, "train", {"rollout.restarts": 0, "train.eval_prompts": 1} | options)
    ended = forked.run_module("colocated_run", arguments, folder=TESTS, environment=environment)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    return [line.removeprefix("CALL ") for line in output.splitlines() if line.startswith("CALL ")]


@pytest.mark.parametrize(("mode", "calls"), [("disaggregated", ["launch"]), ("colocated", STARTED)])
def test_engines_share_what_the_trainer_leaves(start, tmp_path, mode, calls):
    """On the same devices they start after it: SGLang sizes its caches by the memory that is free at its start."""
    assert calls_of(start, tmp_path / "run", {}, MODE=mode, LAST="launch") == calls


@pytest.mark.slow
def test_the_order_of_calls_in_a_run(start, tmp_path):
    calls = calls_of(start, tmp_path / "run", {"train.steps": 2})
    step = ["generate", "sleep", "train_step", "_free_memory", "wake", "begin_update", "fingerprints"]
    evaluation = ["generate"]
    push = ["_free_memory", "begin_update", "fingerprints"]
    assert calls == [*STARTED, *push, *evaluation, *step, *step, *evaluation]
    assert "policy/skipped" in (tmp_path / "run/metrics.jsonl").read_text()


def test_an_engine_that_is_restarted_sleeps_during_the_step_too():
    old, lost, new = MagicMock(), MagicMock(), MagicMock()

    def again(name, number):
        time.sleep(0.2)
        return new

    starting = SimpleNamespace(again=again, restartable={"a", "b"})
    speculation = SimpleNamespace(speculates=False, canary_drafts=0)
    config = load(None, {"rollout.restarts": "1"})
    engines = Engines(config, {"a": old, "b": lost}, starting, speculation, MagicMock())
    engines.pool.drop("b", EngineError("gone"))
    engines.sleep()
    engines.sleep()  # a warm start takes several steps before a push
    assert engines.pool.engines == {"a": old, "b": new}
    old.sleep.assert_called_once_with()
    new.sleep.assert_called_once_with()
    engines.wake()
    new.wake.assert_called_once_with()
