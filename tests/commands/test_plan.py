"""`rlspec plan`: schedules, files for engines, and the gallery of cost tables."""

import json
from pathlib import Path

import pytest

from megatron_rlspec.commands.plan import main
from megatron_rlspec.extensions.simulator.hardware import roofline_table
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
    assert "CUDA graphs of `rlspec serve` with this table, up to batch 256: " in out
    assert "663 if all were captured at every batch" in out and "estimates for 7B parameters" in out


def test_it_writes_what_engines_read(table, tmp_path, capsys):
    names = {name: tmp_path / f"{name}.json" for name in ("json", "sglang")}
    arguments = [part for name, path in names.items() for part in (f"--{name}", str(path))]
    assert main([str(table), "--steps", "0,1,3", *arguments]) == 0
    schedule = SpecSchedule.from_json(json.loads(names["json"].read_text()))
    assert {c.num_steps for row in schedule.configs for c in row} <= {0, 1, 3}
    assert json.loads(names["sglang"].read_text())["1"]["candidate_steps"]
    assert len(list(tmp_path.iterdir())) == 3


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


GALLERY = Path(__file__).parents[2] / "examples/cost_tables"


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.json")), ids=lambda path: path.stem)
def test_the_gallery_s_page_has_every_table_with_its_provenance(path):
    rows = [line for line in (GALLERY / "README.md").read_text().splitlines() if f"]({path.name})" in line]
    loaded = CostTable.load(path)
    kind = "simulated" if loaded.provenance.simulated else "measured"
    assert len(rows) == 1 and all(f"| {word} |" in rows[0] for word in (kind, loaded.provenance.hardware)), rows
    if kind == "measured":
        about = loaded.provenance
        assert all((about.model, about.dtype, about.engine, about.engine_version, about.date))
        assert any(config.off for config in loaded.configs()) and min(row.samples for row in loaded.rounds) >= 8
