"""The documentation site, and what the pages must have of the code."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize("name", ["configuration", "families", "metrics"])
def test_a_generated_page_is_up_to_date(name):
    page = runpy.run_path(str(ROOT / f"tools/{name}_page.py"))["page"]
    assert (ROOT / f"docs/{name}.md").read_text() == page(), f"run python tools/{name}_page.py"
