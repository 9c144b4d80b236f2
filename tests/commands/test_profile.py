import json
from pathlib import Path

import numpy as np
import pytest
import tiny_mimo
import torch
from roofline_tables import roofline_table

from megatron_rlspec.commands import profile
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.cost_table import CostTable, Provenance
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig


def table(path: Path, **changes: str) -> Path:
    facts = {"model": "tiny", "hardware": "here", "dtype": "auto", "engine": "sglang"}
    facts |= {"engine_version": profile.importlib.metadata.version("sglang"), "date": "2025-01-01"} | changes
    roofline_table(Roofline(1.0, 0.1, 0.0, 0.1), chains((0, 1)), (1, 4), (64,), Provenance(**facts)).save(path)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fresh"], "give --model to start an engine"),
        ([], "already holds tp=1; measure again with --fresh"),
        (["--tp", "2", "--hardware", "elsewhere"], "start again with --fresh"),
        (["--fresh", "--url", "http://127.0.0.1:9"], "cannot connect to 127.0.0.1:9: nothing listens there"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path, capsys, options, message):
    path = table(tmp_path / "t.json")
    assert profile.main([str(path), "--model-name", "tiny", "--hardware", "here", *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert CostTable.load(path).provenance.model == "tiny"


def test_the_embedded_engine_is_measured_and_its_rule_uses_the_table(tmp_path, capsys):
    torch.set_num_threads(1)
    shape = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=160)
    model = tiny_mimo.write(tmp_path / "tiny", shape, tiny_mimo.weights(shape))
    out = tmp_path / "table.json"
    options = [str(out), "--engine", "embedded", "--model", str(model), "--steps", "0,1,3"]
    assert profile.main([*options, "--batches", "1,2", "--lengths", "16", "--tolerance", "10"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"rlspec profile: loading {model} into the embedded engine" and said[-1].startswith("wrote ")
    alone = [str(tmp_path / "one.json"), *options[1:], "--batches", "1", "--lengths", "16", "--tolerance", "10"]
    assert profile.main(alone) == 0
    measured = CostTable.load(out)
    assert measured.configs() == (OFF, SpecConfig(1), SpecConfig(3)) and tuple(measured.batches()) == (1, 2)
    assert measured.provenance.engine == "embedded" and measured.provenance.hardware.endswith("threads")
    assert all(measured.ms(SpecConfig(3), b, 60 * b) > measured.ms(OFF, b, 60 * b) for b in (1, 2))
    config, tensors = read_hf(model)
    engine = EmbeddedEngine(config, tensors.items())
    engine.set_spec_rule({"table": str(out), "candidates": [[0, 0, 0], [1, 1, 2], [3, 1, 4]]})
    engine.generate([Request("a", Prompt(0, np.arange(1, 9)), 0)], Sampling(max_new_tokens=8, ignore_eos=True))
    assert sum(engine.spec_rule_report()["rounds"].values()) > 1
    for wrong, message in (
        ("--url http://127.0.0.1:9", "--url: "),
        ("--dtype f4", "--dtype f4"),
        ("--tp 3", "tensor parallel size 3 does not divide heads=4"),
    ):
        assert profile.main([*options, "--fresh", *wrong.split()]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


@pytest.mark.slow
def test_two_tensor_parallel_sizes_are_measured_into_one_table(tmp_path, capsys):
    torch.set_num_threads(1)
    shape = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=160)
    model = tiny_mimo.write(tmp_path / "tiny", shape, tiny_mimo.weights(shape))
    out = tmp_path / "table.json"
    options = [str(out), "--engine", "embedded", "--model", str(model), "--steps", "0,1,3"]
    options += ["--batches", "1,2", "--lengths", "16", "--tolerance", "10"]
    assert profile.main(options) == 0
    measured = CostTable.load(out)
    assert profile.main([*options, "--tp", "1,2"]) == 0
    both = CostTable.load(out)
    assert both.tps == (1, 2) and both.rounds[: len(measured.rounds)] == measured.rounds
    assert both.configs(2) == measured.configs() and both.batches(2) == (1, 2)
    assert all(both.prefill_ms(16, tp=tp) > 0 for tp in (1, 2))
    capsys.readouterr()
    assert profile.main([*options, "--tp", "1,2"]) == 2
    assert "already holds tp=1,2; measure again with --fresh" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_engine_is_measured_resumed_and_validated(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = tiny_mimo.config(hidden=64, layers=8, heads=4, kv_heads=2, ffn=128, vocab=160)
    model = tiny_mimo.write(tmp_path / "tiny", shape, tiny_mimo.weights(shape))
    out = tmp_path / "table.json"
    options = [str(out), "--model", str(model), "--dtype", "float32", "--steps", "0,1,3"]
    options += ["--device", "cpu", "--max-total-tokens", "8192", "--max-running-requests", "16"]
    grid = ["--batches", "1,4", "--lengths", "16,64", "--tolerance", "10"]
    assert profile.main([*options, *grid, "--validate", "1"]) == 0
    said = capsys.readouterr().out
    assert "wrote" in said and "error off the grid: median" in said
    measured = CostTable.load(out)
    assert measured.configs() == (OFF, SpecConfig(0), SpecConfig(1), SpecConfig(3))
    assert len(measured.rounds) == 16 and not measured.provenance.simulated
    for batch in (1, 4):
        plain, step_0, deep = (measured.ms(c, batch, batch * 90) for c in (OFF, SpecConfig(0), SpecConfig(3)))
        assert plain < step_0 < deep  # speculation is really off: no drafter pass runs
    rows = measured.to_json()
    rows["rounds"] = [row for row in rows["rounds"] if row["batch"] == 1]
    out.with_name("table.json.part").write_text(json.dumps(rows))
    assert profile.main([*options, *grid, "--fresh"]) == 0
    assert "continuing after" not in capsys.readouterr().out
    out.with_name("table.json.part").write_text(json.dumps(rows))
    out.unlink()
    assert profile.main([*options, *grid]) == 0
    assert "continuing after 2 points" in capsys.readouterr().out
    again = CostTable.load(out).to_json()["rounds"]
    assert all(row in again for row in rows["rounds"])  # what was measured before the interruption is kept
