"""The documentation site, and what the pages must have of the code."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec.cli import COMMANDS
from megatron_rlspec.config import options

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("tests/**/*.md")]
PAGES += [*ROOT.glob(".github/**/*.md"), *ROOT.glob(".github/**/*.yml")]
TELL_OF_OTHERS = {ROOT / "CHANGELOG.md", ROOT / "docs/configuration.md"}  # what is gone; other projects' names
# Parameters and functions that are written as options are, and a file of slime.
NO_OPTIONS = {"model.mtp_layers", "model.gguf", "push.fingerprint"}
SUFFIXES = (".py", ".md", ".toml", ".json", ".jsonl", ".sh", ".svg")
FILE_OF_SLIME = "tools/convert_hf_to_torch_dist.py"


def build(folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON_BIN": sys.executable}
    command = ["bash", str(folder / "tools/docs.sh"), "--site-dir", str(folder / "site")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_strictly_and_loads_nothing_from_a_network(tmp_path):
    """A page with a dead link or a dead anchor, and a page that is in no menu, end the build."""
    for name in ("docs", "tools", "tests", "examples", "patches", "requirements", "megatron_rlspec", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "site"): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert {Path(f"{path.stem}.html") for path in (ROOT / "docs").glob("*.md")} <= set(pages)
    for path, text in pages.items():
        tags = re.findall(r"<(?:script|img|iframe|source|link)[^>]*>", text)
        loaded = [tag for tag in tags if "https://" in tag or "http://" in tag]
        assert not loaded, f"{path}: {loaded}"
    page = tmp_path / "docs/runs.md"
    page.write_text(page.read_text() + "\n[x](no-page.md) [y](serve.md#no-anchor) [z](../examples/no-file.py)\n")
    (tmp_path / "docs/in-no-menu.md").write_text("# New\n")
    broken = build(tmp_path)
    assert broken.returncode != 0
    for wrong in ("no-page.md", "#no-anchor", "no-file.py"):
        assert re.search(rf"^WARNING.*{wrong}", broken.stderr, re.MULTILINE), wrong
    assert re.search(r"^WARNING.* not included in the \"nav\"[^-]*- in-no-menu.md", broken.stderr, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    """Options, commands of `rlspec`, and files."""
    text = page.read_text()
    options_there = {option.name for option in options()} | NO_OPTIONS
    sections = "|".join({name.partition(".")[0] for name in options_there})
    folders = "megatron_rlspec|tests|tools|benchmarks|examples|requirements|patches"
    files = set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*\w)", text)) - {FILE_OF_SLIME}
    assert not [name for name in files if not (ROOT / name).exists()]
    if page not in TELL_OF_OTHERS:
        named = set(re.findall(rf"(?<![\w./:])((?:{sections})\.[a-z_]+)\b(?![\w./(])", text))
        named = {name for name in named if not name.endswith(SUFFIXES)}
        assert not named - options_there
        assert not set(re.findall(r"(?<![\w/])rlspec ([a-z]+)", text)) - set(COMMANDS)


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_no_line_of_prose_has_more_than_120_columns(page):
    """Code, tables and pictures may have longer ones."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > 120]
    assert not [line for line in long if not line.startswith(("|", "![", "    "))]


@pytest.mark.parametrize("name", ["configuration", "families", "metrics"])
def test_a_generated_page_is_up_to_date(name):
    page = runpy.run_path(str(ROOT / f"tools/{name}_page.py"))["page"]
    assert (ROOT / f"docs/{name}.md").read_text() == page(), f"run python tools/{name}_page.py"
