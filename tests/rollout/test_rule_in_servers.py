"""Without any rule given, `rlspec serve` and a plain SGLang server with the plugin switch refused drafts off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import plain_server
import pytest
import tiny_mimo

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import Prompt, Request, Sampling

pytestmark = pytest.mark.slow
CONFIG = tiny_mimo.config(hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=512)
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--max-running-requests", "8"]
ADAPTIVE = ["--spec", "adaptive", "--candidate-steps", "0,1,2", "--drafts", "argmax"]


@contextmanager
def served(model: Path, folder: Path, ranks: int = 1) -> Iterator[SGLangEngine]:
    cores = "|".join(ranks * [",".join(map(str, sorted(os.sched_getaffinity(0))))])
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": cores}
    arguments = [*SERVE, *ADAPTIVE, "--tp", str(ranks)]
    with launch(model, folder / "log", arguments=arguments, environment=environment) as process:
        yield SGLangEngine.of(process.wait(), timeout=300)


@contextmanager
def plain(model: Path, folder: Path) -> Iterator[SGLangEngine]:
    """Start SGLang's own `launch_server` with the plugin."""
    with plain_server.started(model, folder, json.dumps({"drafts": "argmax"})) as engine:
        yield engine


STARTS = [served, partial(served, ranks=2), plain]


@pytest.mark.parametrize("start", STARTS, ids=["rlspec serve", "two ranks", "plain server"])
def test_refused_drafts_are_off_without_a_rule_given(start, tmp_path: Path) -> None:
    model = tiny_mimo.write(tmp_path / "model", CONFIG, tiny_mimo.weights(CONFIG))
    asked = [Request(f"r-{i}.", Prompt(i, np.arange(1, 9)), i) for i in range(8)]
    with start(model, tmp_path) as engine:
        engine.generate(asked, Sampling(max_new_tokens=120, ignore_eos=True))
        rounds = engine.stats()
        report = engine.spec_rule_report()
    assert report["acceptance"][0] < 0.1, "the case needs a drafter that is never right"
    off = sum(stats.rounds for stats in rounds if stats.config.off)
    assert off > 0.6 * sum(stats.rounds for stats in rounds), report
    assert sum(report["learnt"]["times"]["timings"]) > 10, "the rule learns from the engine's own rounds"
