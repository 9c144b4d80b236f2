import json

import pytest

from megatron_rlspec.speculation.cost_table import Provenance
from megatron_rlspec.speculation.plan import main
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import SpecSchedule


@pytest.fixture
def table(tmp_path):
    provenance = Provenance("7B", "H20", "bfloat16", "roofline", "-", "2025-01-01", simulated=True)
    roofline = Roofline.of_hardware(*HARDWARE["H20"])
    roofline.table(chains((0, 1, 2, 3, 5)), (1, 4, 16, 64, 256), (128, 2048), provenance).save(tmp_path / "t.json")
    return tmp_path / "t.json"


def test_it_prints_a_schedule_and_the_reasons(table, capsys):
    assert main([str(table), "--acceptance", "0.8,0.7,0.6", "--why", "4,4096", "--why", "200,40000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated on H20")
    assert "256" in out and "off" in out and "k3" in out
    assert "batch 4, context 4096 tokens: k" in out and "batch 200, context 40000 tokens: off" in out
    assert "costs are extrapolated" in out
    assert "CUDA graphs of `rlspec serve` with this table, up to batch 256: " in out
    assert "663 if all were captured at every batch" in out and "estimates, not measured" in out


def test_it_writes_what_engines_read(table, tmp_path, capsys):
    names = {name: tmp_path / f"{name}.json" for name in ("json", "sglang", "vllm")}
    arguments = [part for name, path in names.items() for part in (f"--{name}", str(path))]
    assert main([str(table), "--steps", "0,1,3", *arguments]) == 0
    schedule = SpecSchedule.from_json(json.loads(names["json"].read_text()))
    assert {c.num_steps for row in schedule.configs for c in row} <= {0, 1, 3}
    assert json.loads(names["sglang"].read_text())["1"]["candidate_steps"]
    assert json.loads(names["vllm"].read_text())["num_speculative_tokens_per_batch_size"][0][0] == 1
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "0,7"], "holds no num_steps=7"), (["--tp", "8"], "this engine runs tp=8")],
)
def test_a_mistake_gets_one_line(table, capsys, arguments, message):
    assert main([str(table), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_no_table(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
