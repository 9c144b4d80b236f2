"""`rlspec profile`: options, tables, models and outputs that must be refused before an engine is started."""

import json

import pytest
from harness import Case, check, ids

from megatron_rlspec.speculation.cost_table import CostTable, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig


def table(*configs: SpecConfig) -> str:
    provenance = Provenance("tiny", "cpu", "float32", "sglang", "0", "2025-01-01")
    rounds = [RoundCost(1, b, 100 * b, c, 1.0 + b) for b in (1, 8) for c in configs]
    return json.dumps(CostTable(provenance, rounds).to_json())


GOOD = {"t.json": table(OFF, SpecConfig(1))}
URL = "--url http://127.0.0.1:9"


def option(text: str, *expects: str) -> Case:
    return Case(text, f"profile new.json {URL} {text}", expects)


def output(name: str, *expects: str) -> Case:
    return Case(f"out {name[:30]}", ["profile", name, "--url", "http://127.0.0.1:9"], (*expects, "cannot be written"))


def model(name: str, config: str | bytes, *expects: str) -> Case:
    return Case(f"model {name}", "profile new.json --model m", ("m/config.json", *expects), {"m/config.json": config})


def url(address: str, *expects: str) -> Case:
    return Case(f"url {address[:40]}", ["profile", "new.json", "--url", address], ("--url", *expects))


CASES = [
    Case("no table", "profile", ("required: out",)),
    Case("neither model nor url", "profile new.json", ("give --model", "--url")),
    option("--tp 0", "--tp", "'0'", "from 1 to 4096"),
    option("--steps a", "--steps", "'a'", "from 0 to 64"),
    option("--steps 1,,2", "'1,,2'"),
    option("--bathces 4", "--bathces", "did you mean --batches"),
    option("--device cpu", "unrecognized arguments: --device cpu"),
    url("ftp://127.0.0.1:9", "ftp://127.0.0.1:9", "expected http://HOST:PORT"),
    output("no/t.json", "no directory no"),
    output(".", "it is a directory"),
    output("a\0b", "null"),
    Case("model missing", "profile new.json --model none", ("none: no such directory",)),
    model("empty", "", "the file is empty"),
    model("no vocabulary", "{}", "vocab_size=None"),
    Case("table is junk", f"profile t.json {URL}", ("t.json: not valid JSON",), {"t.json": "junk"}),
    Case("table of another model", f"profile t.json {URL} --tp 2", ("t.json was measured on", "--fresh"), GOOD),
    Case("table holds this tp", f"profile t.json {URL}", ("already holds tp=1", "--fresh"), GOOD),
    Case("part is junk", f"profile new.json {URL}", ("new.json.part: not valid JSON",), {"new.json.part": "[[["}),
    Case(
        "part of another model",
        f"profile new.json {URL}",
        ("measured on", "--fresh"),
        {"new.json.part": GOOD["t.json"]},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)
