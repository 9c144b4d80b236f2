"""`rlspec plan`: the gains, what explains them, and mistakes in one line."""

import json

import pytest
from roofline_tables import HARDWARE, of_hardware, roofline_table

from megatron_rlspec.commands.plan import main
from megatron_rlspec.speculation.cost_table import CostTable, Provenance
from megatron_rlspec.speculation.graphs import chains


@pytest.fixture
def table(tmp_path):
    provenance = Provenance("7B", "H20", "bfloat16", "roofline", "-", "2025-01-01", simulated=True)
    roofline = of_hardware(*HARDWARE["H20"])
    path = tmp_path / "t.json"
    roofline_table(roofline, chains((0, 1, 2, 3, 5)), (1, 4, 16, 64, 256), (128, 2048), provenance).save(path)
    return path


def test_it_prints_gains_and_the_reasons(table, capsys):
    assert main([str(table), "--acceptance", "0.8,0.7,0.6", "--why", "4,4096", "--why", "200,40000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated on H20")
    assert "batch 4, context 4096 tokens: k" in out and "batch 200, context 40000 tokens: off" in out
    short = next(line for line in out.splitlines() if line.startswith("       128 "))
    assert short.endswith("1.00 (off)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tp 8", "this engine runs tp=8"),
        ("--why 8,4", "at least one token for each request"),
    ],
)
def test_a_mistake_gets_one_line(table, capsys, monkeypatch, options, message):
    monkeypatch.chdir(table.parent)
    assert main(["t.json", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_table_of_several_sizes_needs_one(table, capsys):
    data = json.loads(table.read_text())
    data["rounds"] += [{**row, "tp": 2} for row in data["rounds"]]
    table.write_text(json.dumps(data))
    assert CostTable.load(table).tps == (1, 2)
    assert main([str(table)]) == 2
    assert "choose one with --tp" in capsys.readouterr().err
    assert main([str(table), "--tp", "2"]) == 0
