"""`rlspec profile` on real engines, and mistakes in one line before an engine starts."""

import numpy as np
import pytest
import tiny_mimo
import torch

from megatron_rlspec import cli
from megatron_rlspec.commands import profile
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig


@pytest.fixture
def model(tmp_path):
    torch.set_num_threads(1)
    shape = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=160)
    return tiny_mimo.write(tmp_path / "tiny", shape, tiny_mimo.weights(shape))


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--url http://127.0.0.1:9", 1, "cannot connect to 127.0.0.1:9"),
        ("--engine embedded --model tiny --url http://127.0.0.1:9", 2, "--url: --engine embedded measures --model"),
        ("--engine embedded --model tiny --tp 3", 2, "tensor parallel size 3 does not divide heads=4"),
    ],
)
def test_a_mistake_gets_one_line(model, capsys, monkeypatch, options, code, message):
    monkeypatch.chdir(model.parent)
    assert cli.run(lambda: profile.main(["t.json", *options.split()])) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_rule_of_the_embedded_engine_uses_its_table(model, tmp_path, capsys):
    out = tmp_path / "table.json"
    options = [str(out), "--engine", "embedded", "--model", str(model), "--steps", "0,1,3", "--seconds", "0"]
    assert profile.main([*options, "--batches", "1", "--lengths", "16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"wrote {out}: 1 points")
    table = CostTable.load(out)
    assert table.configs() == (OFF, SpecConfig(1), SpecConfig(3)) and table.provenance.engine == "embedded"
    assert table.provenance.dtype == "float32"
    config, tensors = read_hf(model)
    engine = EmbeddedEngine(config, tensors.items())
    engine.set_spec_rule({"table": str(out), "candidates": [[0, 0, 0], [1, 1, 2], [3, 1, 4]]})
    engine.generate([Request("a", Prompt(0, np.arange(1, 9)), 0)], Sampling(max_new_tokens=8, ignore_eos=True))
    assert sum(engine.spec_rule_report()["rounds"].values()) > 1


@pytest.mark.slow
def test_two_tensor_parallel_sizes_are_measured_into_one_table(model, tmp_path):
    out = tmp_path / "table.json"
    options = ["--engine", "embedded", "--model", str(model), "--steps", "0,1,3", "--seconds", "0"]
    assert profile.main([str(out), *options, "--batches", "1", "--lengths", "16", "--tp", "1,2"]) == 0
    table = CostTable.load(out)
    assert table.tps == (1, 2) and table.at(1).configs() == table.at(2).configs()
    assert all(table.at(tp).prefill_ms(16) > 0 for tp in (1, 2))


@pytest.mark.slow
def test_an_engine_of_sglang_is_started_and_measured(tmp_path):
    shape = tiny_mimo.config(hidden=64, layers=8, heads=4, kv_heads=2, ffn=128, vocab=160)
    model = tiny_mimo.write(tmp_path / "tiny", shape, tiny_mimo.weights(shape))
    out = tmp_path / "table.json"
    options = ["--model", str(model), "--dtype", "float32", "--steps", "0,1,3", "--seconds", "30"]
    options += ["--device", "cpu", "--max-total-tokens", "8192", "--max-running-requests", "16"]
    assert profile.main([str(out), *options, "--batches", "1,4", "--lengths", "16"]) == 0
    table = CostTable.load(out)
    assert table.configs() == (OFF, SpecConfig(0), SpecConfig(1), SpecConfig(3)) and len(table.rounds) == 8
    assert not table.provenance.simulated
