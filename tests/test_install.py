"""pip itself reports what an installation would replace (`--dry-run`), and Dockerfiles are read as Docker reads them.

The environments hold stand-ins: the metadata of a distribution without its files, from which pip decides. The
Dockerfiles are not built: that needs Docker and their base images.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_LOCKED = {"wandb"}  # no package of this extra is in cpu.txt
INSTALLED = [extra for extra in PROJECT["optional-dependencies"] if extra not in NOT_LOCKED]


@dataclass(frozen=True)
class Held:
    """A distribution of an environment: its version, its requirements, and whether it is an editable checkout."""

    version: str
    requires: tuple[str, ...] = ()
    editable: bool = False


# slime 624b824a8's image: Megatron-LM as a checkout of a pre-release, numpy below 2.
SLIME = {
    "torch": Held("2.11.0+cu129"),
    "megatron-core": Held("0.16.0rc0", ("torch>=2.6.0", "numpy"), editable=True),
    "transformers": Held("5.12.1", ("numpy>=1.17",)),
    "sglang": Held("0.5.15.post1", ("torch==2.11.0", "transformers==5.12.1", "numpy"), editable=True),
    "transformer-engine": Held("2.16.1"),
    "transformer-engine-cu12": Held("2.16.1"),
    "transformer-engine-torch": Held("2.16.1", ("torch>=2.1", "transformer_engine_cu12==2.16.1")),
    "apex": Held("0.1"),
    "slime": Held("0.3.1", ("transformers", "numpy"), editable=True),
    "numpy": Held("1.26.4"),
    "scipy": Held("1.17.1", ("numpy>=1.26.4",)),
}


def make_environment(folder: Path, holds: dict[str, Held]) -> str:
    """Make a virtual environment that holds the stand-ins. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, held in holds.items():
        info = site / f"{name.replace('-', '_')}-{held.version}.dist-info"
        info.mkdir()
        asks = "".join(f"Requires-Dist: {requirement}\n" for requirement in held.requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {held.version}\n{asks}")
        (info / "RECORD").write_text("")
        (info / "INSTALLER").write_text("pip\n")
        if held.editable:
            origin = {"url": (folder / "src" / name).as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(origin))
    return str(folder / "bin/python")


def would_install(python: str, what: str, report: Path) -> set[str]:
    """Return the names that `pip install WHAT` would put into the environment of `python`, without an index."""
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--quiet", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    command += ["--report", str(report), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return {canonicalize_name(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}


def pins(name: str) -> dict[str, Requirement]:
    """Return the requirements of a file in requirements/ by name."""
    lines = [line.partition(" #")[0] for line in (REQUIREMENTS / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found = [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate()]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in found}
    assert len(by_name) == len(found), f"{name} names a distribution twice"
    return by_name


def asked(requirements: Iterable[str], extra: str = "") -> list[Requirement]:
    """Return the requirements that hold on this machine, for one extra or for none."""
    parsed = [Requirement(text) for text in requirements]
    return [wanted for wanted in parsed if wanted.marker is None or wanted.marker.evaluate({"extra": extra})]


def brought(known: Iterable[str]) -> dict[str, Held]:
    """Return what this package's dependencies bring, and what that asks for of the distributions `known`.

    Read from the environment that the tests run in.
    """
    found: dict[str, Held] = {}
    waiting = asked(PROJECT["dependencies"] + sum((PROJECT["optional-dependencies"][extra] for extra in INSTALLED), []))
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name in known:
            continue
        there = importlib.metadata.distribution(name)
        needs = asked(there.requires or ())
        for extra in requirement.extras:
            needs += asked(there.requires or (), extra)
        of_known = (need for need in needs if canonicalize_name(need.name) in known)
        found[name] = Held(there.version, tuple(str(need).partition(";")[0] for need in of_known))
        waiting += needs
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build this package as a wheel, by setuptools in the environment that the tests run in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("megatron_rlspec", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.split()[-1]


def test_the_wheel_holds_every_file_of_the_package_and_the_examples(wheel):
    here = [p for name in ("megatron_rlspec", "examples") for p in (ROOT / name).rglob("*") if p.is_file()]
    here = {
        path.relative_to(ROOT).as_posix()
        for path in here
        if not {"__pycache__", ".ruff_cache", "ruff.toml"} & {*path.parts}
    }
    there = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    there = {re.sub(r"^megatron_rlspec-[^/]*\.data/data/share/megatron_rlspec/", "", name) for name in there}
    assert there == here and {"megatron_rlspec/commands/report/page.html.j2", "examples/quickstart.sh"} <= there


def test_pip_replaces_nothing_if_everything_is_installed(wheel, tmp_path):
    """Install all extras without an index: pip fails if one installed version does not meet a requirement."""
    python = make_environment(tmp_path / "venv", brought(SLIME) | SLIME)
    everything = f"{wheel}[{','.join(INSTALLED)}]"
    assert would_install(python, everything, tmp_path / "report.json") == {"megatron-rlspec"}


def test_every_lock_meets_the_packages_requirements():
    bare = {canonicalize_name(wanted.name): wanted for wanted in asked(PROJECT["dependencies"])}
    extras = PROJECT["optional-dependencies"]
    gpu = {canonicalize_name(wanted.name): wanted for wanted in asked(extras["train"] + extras["engine"])}
    for lock, wanted in (("gpu.txt", bare | gpu), ("cpu.txt", bare | gpu)):
        pinned = pins(lock)
        for name, requirement in wanted.items():
            (exact,) = pinned[name].specifier
            assert exact.operator == "==" and requirement.specifier.contains(exact.version), f"{lock}: {requirement}"


@pytest.mark.parametrize("path", sorted((ROOT / "tools/docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_what_a_dockerfile_copies_exists_and_is_enough_to_install(path):
    text = path.read_text()
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "megatron_rlspec"} <= copied
    assert set(re.findall(r"-r (\S+)", text)) <= copied
