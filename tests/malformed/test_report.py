"""`rlspec report`: records, samples, configurations and outputs that must be refused."""

import json
from pathlib import Path

import pytest
from harness import Case, check, ids

from megatron_rlspec.commands import report

STEPS = "".join(json.dumps({"step": step, "rollout/reward": 0.5, "policy/loss": 0.1}) + "\n" for step in range(3))
SAMPLE = {"step": 1, "prompt": "p", "response": "r", "label": "1", "reward": 1.0, "accepted": [0, 2]}


def run(**files: str | bytes) -> dict[str, str | bytes]:
    return {f"run/{name.replace('_', '.')}": content for name, content in {"metrics_jsonl": STEPS, **files}.items()}


def metrics(name: str, content: str | bytes, *expects: str) -> Case:
    return Case(f"metrics {name}", "report run", ("metrics.jsonl", *expects), {"run/metrics.jsonl": content})


def step(name: str, *expects: str, **values: object) -> Case:
    return metrics(name, STEPS + json.dumps({"step": 3, **values}) + "\n", "metrics.jsonl:4", *expects)


def sample(name: str, *expects: str, **values: object) -> Case:
    row = {key: value for key, value in (SAMPLE | values).items() if value is not ...}
    content = json.dumps(SAMPLE) + "\n" + json.dumps(row) + "\n"
    return Case(f"sample {name}", "report run", ("samples.jsonl:2", *expects), run(samples_jsonl=content))


def config(name: str, content: str | bytes, *expects: str) -> Case:
    return Case(f"config {name}", "report run", ("config.json", *expects), run(config_json=content))


def output(name: str, *expects: str) -> Case:
    return Case(f"out {name[:30]}", ["report", "run", "--out", name], expects, run())


def with_directory(here: Path) -> None:
    (here / "run/metrics.jsonl").mkdir(parents=True)


CASES = [
    Case("no run", "report", ("required: RUN_DIR",)),
    Case("missing run", "report none", ("none: no metrics.jsonl", "expected a run directory")),
    Case("unknown option", "report run --format pdf", ("unrecognized arguments: --format pdf",), run()),
    Case("metrics directory", "report run", ("metrics.jsonl", "directory"), with_directory),
    metrics("only torn", '{"step": 0', "at least one step"),
    metrics("integers", "1\n2\n3\n", "metrics.jsonl:1", "not a JSON object"),
    metrics("text in the middle", STEPS + "oops\n" + STEPS, "metrics.jsonl:4", "not valid JSON"),
    metrics("key twice", '{"step": 1, "step": 2}\n' + STEPS, "metrics.jsonl:1", "'step' appears twice"),
    step("value list", "rollout/reward", "[1, 2]", **{"rollout/reward": [1, 2]}),
    sample("text", "accepted", '"x"', accepted="x"),
    Case("samples integers", "report run", ("samples.jsonl:1",), run(samples_jsonl="1\n2\n")),
    Case("event without kind", "report run", ("events.jsonl:1", "kind"), run(events_jsonl='{"message": "m"}\n')),
    Case(
        "event message", "report run", ("events.jsonl:1", "message"), run(events_jsonl='{"kind": "a", "message": 1}\n')
    ),
    config("nan", '{"a": NaN}', "NaN is no JSON number"),
    output(".", "it is a directory"),
    output("/dev/full", "No space left on device"),
    output("run/metrics.jsonl", "this file is read: the run run"),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def test_strange_records_that_a_run_may_leave_are_drawn(tmp_path):
    """NaN, infinities, huge numbers, a missing reward, half a surrogate pair, a torn last line."""
    values = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 10**300, None, True, "text"]
    lines = [{"step": i, "rollout/reward": value, "seconds_train": value} for i, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "ro')
    odd = SAMPLE | {"reward": None, "response": "half \ud800 a pair", "prompt": "\0\x1b[31m"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(odd) + "\n")
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "half ? a pair" in page and "<dt>steps</dt><dd>9</dd>" in page
