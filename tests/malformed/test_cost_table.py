"""Cost tables that every command must refuse."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Case, check, ids

from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig

CONFIGS = (OFF, SpecConfig(1), SpecConfig(3))


def good() -> dict:
    """A table of 2 batches, 2 contexts and 3 configurations, as JSON."""
    provenance = Provenance("tiny", "cpu", "float32", "sglang", "0", "2025-01-01")
    rounds = [
        RoundCost(1, b, n * b, c, 1.0 + b + 0.1 * c.num_steps + n / 1000)
        for b in (1, 8)
        for n in (100, 900)
        for c in CONFIGS
    ]
    return CostTable(provenance, rounds, [PrefillCost(1, 1, 10, 1.0), PrefillCost(1, 1, 20, 2.0)]).to_json()


def edited(edit: Callable[[dict], object]) -> dict[str, str]:
    table = copy.deepcopy(good())
    edit(table)
    return {"t.json": json.dumps(table)}


def case(name: str, edit: Callable[[dict], object], *expects: str) -> Case:
    return Case(name, "plan t.json", ("t.json", *expects), edited(edit))


def row(**values: object) -> Callable[[dict], object]:
    return lambda table: table["rounds"][0].update(values)


def file(name: str, content: str | bytes, *expects: str) -> Case:
    return Case(name, "plan t.json", ("t.json", *expects), {"t.json": content})


CASES = [
    Case("missing", "plan t.json", ("t.json", "No such file")),
    case("unknown key", lambda t: t.update(colour="red"), "unknown field 'colour'"),
    case("ms text", row(ms="1"), "rounds[0]: ms='1', expected a number"),
    case("twice", lambda t: t["rounds"].append(t["rounds"][0]), "measured twice"),
    case("hole", lambda t: t["rounds"].pop(), "hole at tp=1 batch=8"),
    case("no off", lambda t: t.update(rounds=[r for r in t["rounds"] if r["topk"]]), "no plain-decoding row"),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def test_the_good_table_is_good(tmp_path: Path):
    (tmp_path / "t.json").write_text(json.dumps(good()))
    assert CostTable.load(tmp_path / "t.json").to_json() == good()
