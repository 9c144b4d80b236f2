"""`rlspec plan`: schedules, files for engines, the picture, simulated rollouts, and the gallery of cost tables."""

import json
from pathlib import Path

import numpy as np
import pytest
from roofline_tables import roofline_table

from megatron_rlspec.commands import simulate, sizing
from megatron_rlspec.commands.plan import lacking, main
from megatron_rlspec.speculation.cost_table import CostTable, Provenance
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import SpecSchedule


@pytest.fixture
def table(tmp_path):
    provenance = Provenance("7B", "H20", "bfloat16", "roofline", "-", "2025-01-01", simulated=True)
    roofline = Roofline.of_hardware(*HARDWARE["H20"])
    roofline_table(roofline, chains((0, 1, 2, 3, 5)), (1, 4, 16, 64, 256), (128, 2048), provenance).save(
        tmp_path / "t.json"
    )
    return tmp_path / "t.json"


def test_it_prints_a_schedule_and_the_reasons(table, capsys):
    assert main([str(table), "--acceptance", "0.8,0.7,0.6", "--why", "4,4096", "--why", "200,40000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated on H20")
    assert "256" in out and "off" in out and "k3" in out
    assert "batch 4, context 4096 tokens: k" in out and "batch 200, context 40000 tokens: off" in out
    assert "costs are extrapolated" in out
    assert "times plain decoding, by running requests with 2048 tokens each: 1: " in out and "256: 1.00 (off)" in out


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


WORKLOAD = """
[cluster]
engines = 4
hardware = "H20"
[workload]
prompts = 4
samples = 4
median = 20
p95 = 60
cap = 64
"""


@pytest.mark.parametrize("measured", [False, True])
def test_simulated_rollouts_answer_what_a_table_cannot(table, tmp_path, capsys, measured):
    (tmp_path / "cluster.toml").write_text(WORKLOAD)
    given = [str(table)] if measured else []
    assert main([*given, "--cluster", str(tmp_path / "cluster.toml"), "--train-seconds", "1", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = next(line for line in lines if line.startswith("simulated, 2 rollouts"))
    assert (str(table) if measured else "data sheet of H20") in said
    for question in ("how many engines", "which tensor-parallel size", "colocated or apart", "at which caps"):
        assert any(line.startswith(question) for line in lines)
    steps = {line.split(" staleness ")[0].strip() for line in lines if ", staleness" in line and "[" in line}
    assert {"colocated,", "apart, 2 GPUs draw, 2 train,"} <= steps
    assert lines[-1].startswith("up to ") and "lie outside" in lines[-1]
    assert any("tp=1; other sizes need a table" in line for line in lines) == measured


def test_a_step_apart_takes_the_longer_part_and_one_on_shared_gpus_the_sum(tmp_path):
    (tmp_path / "cluster.toml").write_text(WORKLOAD)
    rollouts = sizing.Rollouts(simulate.read(tmp_path / "cluster.toml"), 2)
    whole = rollouts.seconds(4, 1).mean()
    half = rollouts.seconds(2, 1)
    lines = list(sizing._placements(rollouts, 100.0, 7.0))
    seconds = {line[:48].strip(): float(line[48:].split()[0]) for line in lines[2:] if "[" in line}
    assert seconds["colocated, staleness 0"] == pytest.approx(whole + 107, abs=0.1)
    assert seconds["apart, 2 GPUs draw, 2 train, staleness 0"] == pytest.approx(half.mean() + 200, abs=0.1)
    assert seconds["apart, 2 GPUs draw, 2 train, staleness 1"] == pytest.approx(np.maximum(half, 200).mean(), abs=0.1)
    assert (rollouts.seconds(4, 1, policy="off+in_flight") > rollouts.seconds(4, 1)).all()


def test_what_a_table_lacks_for_the_gallery_is_said(table, capsys):
    assert main([str(table), "--check"]) == 1
    said = capsys.readouterr()
    assert "provenance.simulated is true" in said.err and "not ready for the gallery" in said.out
    data = json.loads(table.read_text())
    data["provenance"] |= {"simulated": False, "date": "2026-11-22", "engine_version": "1"}
    table.write_text(json.dumps(data))
    assert main([str(table), "--check"]) == 0
    assert "ready for the gallery" in capsys.readouterr().out
    data["rounds"] = [row for row in data["rounds"] if not row["num_steps"] and row["batch"] < 16]
    table.write_text(json.dumps(data))
    assert main([str(table), "--check"]) == 1
    err = capsys.readouterr().err
    assert "expected off and at least one" in err and "2 batches" in err


GALLERY = Path(__file__).parents[2] / "examples/cost_tables"


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.json")), ids=lambda path: path.stem)
def test_the_gallery_s_page_has_every_table_with_its_provenance(path):
    rows = [line for line in (GALLERY / "README.md").read_text().splitlines() if f"]({path.name})" in line]
    loaded = CostTable.load(path)
    kind = "simulated" if loaded.provenance.simulated else "measured"
    assert len(rows) == 1 and all(f"| {word} |" in rows[0] for word in (kind, loaded.provenance.hardware)), rows
    assert loaded.provenance.simulated or not list(lacking(loaded))
