"""`rlspec simulate`: files, policies and outputs that must be refused before anything is simulated."""

from pathlib import Path

import pytest
from harness import Case, check, ids

CLUSTER = """
[cluster]
engines = 3
hardware = "H100"
[workload]
prompts = 2
samples = 2
median = 40
p95 = 200
cap = 256
"""
GOOD = {"c.toml": CLUSTER, "t.json": "{}"}


def option(text: str, *expects: str) -> Case:
    return Case(text, f"simulate c.toml --policies off --seeds 1 {text}", expects, GOOD)


def setting(text: str, *expects: str, section: str = "cluster") -> Case:
    return Case(text, "simulate c.toml", ("c.toml", *expects), {"c.toml": f"{CLUSTER}\n[{section}]\n{text}"})


def changed(before: str, after: str, *expects: str) -> Case:
    return Case(after, "simulate c.toml", ("c.toml", *expects), {"c.toml": CLUSTER.replace(before, after)})


def linked(make):
    def write(here: Path) -> None:
        (here / "c.toml").write_text(CLUSTER)
        make(here / "c.toml", here / "link")

    return write


def hard(path: Path, link: Path) -> None:
    link.hardlink_to(path)


def soft(path: Path, link: Path) -> None:
    link.symlink_to(path)


OVER = ("--json link", "this file is read: the configuration")
CASES = [
    option("--json c.toml", "--json c.toml: this file is read: the configuration"),
    Case("over a hard link", "simulate c.toml --json link", OVER, linked(hard)),
    Case("over a symbolic link", "simulate c.toml --json link", OVER, linked(soft)),
    Case(
        "over the table",
        "simulate c.toml --json t.json",
        ("--json t.json: this file is read: its cost table",),
        {**GOOD, "c.toml": CLUSTER.replace('hardware = "H100"', 'table = "t.json"')},
    ),
    option("--policies k99999999999", "expected off, k3, a tree"),
    option("--policies off,off", "expected each policy once"),
    Case("nested arrays", "simulate c.toml", ("c.toml: not TOML",), {"c.toml": "a = " + "[" * 100_000}),
    changed("engines = 3", "engines = 3\nsizes = [7]", "sizes holds 7, but engines=3 of tp=1 are 3 GPUs"),
    changed("engines = 3", "engines = 3\nmax_tokens = 10", "max_tokens=10 cannot hold one sample", "512"),
    changed('hardware = "H100"', 'table = "t.json"\nlayers = 8', "layers is for the roofline of hardware"),
    changed("engines = 3", "engines = 3\nsizes = [3, 3]", "sizes=3,3: expected each size once"),
    option("--sweep cluster.engines=3,3", "--sweep cluster.engines=3,3: 3 comes twice; expected each value once"),
    option("--sweep cluster.link=9,9.0", "--sweep cluster.link=9,9.0: 9.0 comes twice"),
    setting("wake = 3", "training: wake=3 has no effect while colocated=false", section="training"),
    setting("colocated = true\nstaleness = 1", "colocated=true", "staleness=1", section="training"),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)
