"""`rlspec plan`: options and outputs that must be refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Case, check, ids

from megatron_rlspec.speculation.cost_table import CostTable, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig


def table(tps=(1,)) -> str:
    provenance = Provenance("tiny", "cpu", "float32", "sglang", "0", "2025-01-01")
    configs = (OFF, SpecConfig(1), SpecConfig(3))
    rounds = [RoundCost(tp, b, 100 * b, c, 1.0 + b + 0.1 * c.num_steps) for tp in tps for b in (1, 8) for c in configs]
    return json.dumps(CostTable(provenance, rounds).to_json())


GOOD = {"t.json": table()}


def option(text: str, *expects: str) -> Case:
    return Case(text, f"plan t.json {text}", expects, GOOD)


def output(option: str, name: str, *expects: str, writes=GOOD) -> Case:
    return Case(f"{option} {name[:40]}", ["plan", "t.json", option, name], (*expects, "cannot be written"), writes)


def with_pipe(here: Path) -> None:
    (here / "t.json").write_text(table())
    os.mkfifo(here / "pipe")


def with_link(here: Path) -> None:
    (here / "t.json").write_text(table())
    (here / "o.json").write_text("")
    (here / "link").symlink_to("o.json")


CASES = [
    Case("no table", "plan", ("required: table",)),
    option("--acceptance abc", "--acceptance", "'abc'", "numbers from 0 to 1"),
    option("--tp x", "--tp", "'x'", "integers from 1 to 4096"),
    option("--tp 2", "tp=[1]", "tp=2"),
    Case("several tp", "plan t.json", ("choose one with --tp",), {"t.json": table((1, 2))}),
    option("--steps 7", "holds no num_steps=7"),
    option("--max-batch 0", "--max-batch", "'0'", "integers from 1 to 16384"),
    option("--why 8,4", "--why 8,4", "at least one token for each request"),
    option("--bogus", "unrecognized arguments: --bogus"),
    *(output(name, "no/x.json", "no directory no") for name in ("--json", "--sglang", "--vllm")),
    output("--json", "/proc/x", "/proc/x"),
    output("--json", ".", "it is a directory"),
    output("--json", "/dev/full", "No space left on device"),
    output("--json", "pipe", "No such device or address", writes=with_pipe),
    Case("over the table", "plan t.json --json t.json", ("t.json", "the cost table"), GOOD),
    Case(
        "two to one file", "plan t.json --json o.json --vllm o.json", ("o.json", "--json writes this file, too"), GOOD
    ),
    Case("to one file by a link", "plan t.json --json link --vllm o.json", ("--json writes this file",), with_link),
    *(
        Case(f"cluster {text}", f"plan --cluster c.toml {text}", (f"{text.split()[0]} has no effect without table",))
        for text in ("--json x.json", "--why 1,1", "--acceptance 0.1", "--tp 2", "--check")
    ),
    option("--seeds 2", "--seeds has no effect without --cluster"),
    option("--check --json x.json", "--json has no effect with --check"),
    Case("off only", "plan t.json --steps 0 --sglang o.json", ("hold no chain",), GOOD),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def plan(folder: Path, *arguments: str, **streams) -> subprocess.CompletedProcess:
    (folder / "t.json").write_text(table())
    command = [sys.executable, "-m", "megatron_rlspec.cli", "plan", "t.json", *arguments]
    return subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, timeout=60, **streams)


def test_devices_stay_devices_and_standard_output_is_written_to(tmp_path):
    before = {name: os.stat(name) for name in ("/dev/full", "/dev/null")}
    assert plan(tmp_path, "--json", "/dev/full", stdout=subprocess.PIPE).returncode == 2
    done = plan(tmp_path, "--vllm", "/dev/null", "--json", "/dev/stdout", stdout=subprocess.PIPE)
    assert done.returncode == 0 and '"batch_edges"' in done.stdout
    assert all(os.stat(name).st_rdev == about.st_rdev for name, about in before.items())


def test_output_that_cannot_be_printed_is_no_traceback(tmp_path):
    with open("/dev/full", "w") as full:
        done = plan(tmp_path, stdout=full)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = plan(tmp_path, stdout=writer)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""
