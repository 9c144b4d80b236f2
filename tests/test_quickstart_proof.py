"""The quickstart's closing tables, of a tiny run, with embedded engines in place of servers."""

import json
import os
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import short_run

from megatron_rlspec.config import load
from megatron_rlspec.rollout.sglang.client import launcher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import embedded
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecSchedule

STEP = {"seconds_generate": 1.0, "seconds_push": 1.0, "seconds_train": 1.0, "drift/kl": 0.1}


def test_the_closing_tables_are_printed(start, tmp_path, monkeypatch, capsys):
    for part in ("warm", "rl", "control", "upper"):
        shutil.copytree(start / "model", tmp_path / part / "hf")
    shutil.copytree(start / "task", tmp_path / "task")
    options = {"model.path": str(start / "model"), "model.dtype": "float32", "model.max_length": "256"}
    options |= {"rollout.max_new_tokens": "24", "rollout.engine": "embedded", "spec.candidate_steps": "0,3,5"}
    config = load(None, options)
    (tmp_path / "rl/config.json").write_text(config.model_dump_json())
    rule = {"candidates": [[0, 0, 0], [3, 1, 4]], "roofline": Roofline.of_layers(4).to_json()}
    (tmp_path / "rl/spec_rule.json").write_text(json.dumps(rule))
    (tmp_path / "rl/metrics.jsonl").write_text(json.dumps({"step": 0, **STEP}) + "\n")
    events = [{"kind": "evaluation", "name": name, "reward": 0.5, "prompts": 8} for name in ("first", "last")]
    (tmp_path / "rl/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    @contextmanager
    def launch(*_, **__):
        engine = embedded(config)
        engine.set_schedule(SpecSchedule.fixed(OFF))
        yield SimpleNamespace(wait=lambda: engine, process=SimpleNamespace(pid=os.getpid()))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(SGLangEngine, "of", lambda engine: engine)
    short_run.script(short_run.EXAMPLES / "proof.py", "--run", tmp_path, "--prompts", 4, "--repeats", 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["comparison"]["equal_texts"] == summary["comparison"]["prompts"] == 4
    assert len(summary["coupled"]) == 2 and "co-trained / plain" in capsys.readouterr().out
