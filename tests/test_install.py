"""pip itself reports what an installation would replace in environments that train or serve (`--dry-run`).

The environments hold stand-ins: the metadata of a distribution without its files, from which pip decides. The fast case
needs no package index: all requirements of this package are installed already. The slow cases resolve against the index
that pip is configured with, for each Python in VERSIONS, which is found as python3.11 or by the variable PYTHON311.
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
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("", *PROJECT["optional-dependencies"])
NOT_LOCKED = {"wandb"}  # no package of this extra is in cpu.txt; the slow cases ask the index for it
INSTALLED = [extra for extra in PROJECT["optional-dependencies"] if extra not in NOT_LOCKED]
VERSIONS = ("3.11", "3.12")


@dataclass(frozen=True)
class Held:
    """A distribution of an environment: its version, its requirements, and whether it is an editable checkout."""

    version: str
    requires: tuple[str, ...] = ()
    editable: bool = False


@dataclass(frozen=True)
class Environment:
    holds: dict[str, Held]
    extras: tuple[str, ...] = field(default=EXTRAS)  # those that bring nothing that the environment lacks
    constrained: bool = False  # the image's PIP_CONSTRAINT pins what it holds


# slime 624b824a8's image: Megatron-LM as a checkout of a pre-release, numpy below 2.
SLIME = Environment(
    {
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
)
# SGLang's image with a nightly build, and a Megatron-LM checkout that is ahead of every release.
SGLANG = Environment(
    {
        "torch": Held("2.14.1+cu130"),
        "megatron-core": Held("0.20.0rc0", ("torch>=2.6.0", "numpy"), editable=True),
        "transformers": Held("5.19.0", ("numpy>=1.17",)),
        "sglang": Held("0.5.24.dev20261101+g0123abc", ("torch==2.14.1", "transformers==5.19.0", "numpy")),
        "transformer-engine": Held("2.12.0"),
        "numpy": Held("2.3.5"),
    }
)
# NVIDIA's PyTorch image: pre-releases of torch and Transformer Engine, and nothing to serve with. Since 25.03 it pins
# its packages by /etc/pip/constraint.txt (the image's release notes). scipy 1.18 needs numpy 2: pip takes an older one.
PYTORCH = Environment(
    {
        "torch": Held("2.13.0a0+0123abc.nv26.05"),
        "transformer-engine": Held("2.17.0.dev0+0123abc"),
        "numpy": Held("1.26.4"),
    },
    ("", "train", "dev"),
    constrained=True,
)
ENVIRONMENTS = {"slime": SLIME, "sglang": SGLANG, "pytorch": PYTORCH}


def interpreter(version: str) -> str:
    variable = f"PYTHON{version.replace('.', '')}"
    named = os.environ.get(variable) or shutil.which(f"python{version}") or ""
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    said = subprocess.run([named, "-c", code], capture_output=True, text=True).stdout.strip() if named else ""
    if said != version:
        pytest.fail(f"Python {version} not found: put python{version} on PATH, or set {variable} to its path")
    return named


def make_environment(python: str, folder: Path, holds: dict[str, Held]) -> str:
    """Make a virtual environment that holds the stand-ins. Returns its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
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


def would_install(
    python: str, what: list[str], report: Path, *, index: bool, constraints: dict[str, Held] | None = None
) -> dict[str, str]:
    """Return names and versions that `pip install WHAT` would put into the environment of `python`."""
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--quiet", "--report", report]
    environment = dict(os.environ)
    if not index:
        command.append("--no-index")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment["PIP_CONFIG_FILE"] = os.devnull
    if constraints:
        pinned = report.with_suffix(".constraints")
        pinned.write_text("".join(f"{name}=={held.version}\n" for name, held in constraints.items()))
        environment["PIP_CONSTRAINT"] = str(pinned)
    done = subprocess.run([*command, *what], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    planned = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonicalize_name(metadata["name"]): metadata["version"] for metadata in planned}


def pins(name: str) -> dict[str, Requirement]:
    """Return the requirements of a file in requirements/ by name."""
    lines = [line.partition(" #")[0] for line in (REQUIREMENTS / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
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
    here = {path.relative_to(ROOT).as_posix() for path in here if "__pycache__" not in path.parts}
    there = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    there = {re.sub(r"^megatron_rlspec-[^/]*\.data/data/share/megatron_rlspec/", "", name) for name in there}
    assert there == here and {"megatron_rlspec/commands/report/page.html.j2", "examples/quickstart.sh"} <= there


@pytest.mark.parametrize("name", ["slime", "sglang"])
def test_pip_replaces_nothing_if_everything_is_installed(name, wheel, tmp_path):
    """Install all extras without an index: pip fails if one installed version does not meet a requirement."""
    environment = ENVIRONMENTS[name]
    holds = brought(environment.holds) | environment.holds
    python = make_environment(sys.executable, tmp_path / "venv", holds)
    everything = f"{wheel}[{','.join(INSTALLED)}]"
    assert set(would_install(python, [everything], tmp_path / "report.json", index=False)) == {"megatron-rlspec"}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "name, extra", [(name, extra) for name, there in ENVIRONMENTS.items() for extra in there.extras]
)
def test_pip_replaces_nothing_that_trains_or_serves(name, extra, version, wheel, tmp_path):
    """With the package index, which has newer versions of everything: pip keeps what is installed."""
    image = ENVIRONMENTS[name]
    python = make_environment(interpreter(version), tmp_path / "venv", image.holds)
    constraints = image.holds if image.constrained else None
    wanted = [f"{wheel}[{extra}]" if extra else str(wheel)]
    planned = would_install(python, wanted, tmp_path / "r.json", index=True, constraints=constraints)
    assert "megatron-rlspec" in planned
    replaced = set(planned) & set(image.holds)
    assert not replaced, {held: (image.holds[held].version, planned[held]) for held in replaced}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_pip_takes_a_release_of_megatron_core_where_there_is_none(version, tmp_path):
    """The specifier accepts a pre-release that is installed, but pip does not choose one itself."""
    (wanted,) = (text for text in PROJECT["optional-dependencies"]["train"] if text.startswith("megatron-core"))
    python = make_environment(
        interpreter(version), tmp_path / "venv", {"torch": Held("2.14.1"), "numpy": Held("2.3.5")}
    )
    planned = would_install(python, [wanted], tmp_path / "r.json", index=True)
    assert re.fullmatch(r"0\.\d+\.\d+", planned["megatron-core"]) and "torch" not in planned


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_slimes_image_gets_exactly_what_it_lacks(version, wheel, tmp_path):
    """With requirements/slime-image.txt, pip would add only packages that the image has from slime and SGLang."""
    added = {name: Held(next(iter(pin.specifier)).version) for name, pin in pins("slime-image.txt").items()}
    python = make_environment(interpreter(version), tmp_path / "venv", SLIME.holds | added)
    planned = would_install(python, [str(wheel)], tmp_path / "r.json", index=True)
    assert not set(planned) & set(added)


# What the images install, by their public definitions: SGLang's release; slime's requirements.txt at 624b824a8, and
# what its Dockerfile names beside SGLang's image. Megatron-LM's checkout asks for torch, numpy and packaging only.
_SLIME = """sglang==0.5.15.post1 numpy==1.26.4 scipy==1.17.1 nvidia-modelopt[torch]>=0.37.0 accelerate anthropic blake3
blobfile datasets httpx[http2] mcp[cli] numba omegaconf openai pillow pylatexenc pyyaml qwen_vl_utils ray[default]
safetensors sglang-router>=0.3.0 tensorboard transformers wandb"""
DEFINITIONS = {"slime": _SLIME.split(), "sglang": ["sglang==0.5.23"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_an_image_and_its_list_hold_all_that_the_package_asks_for(name, wheel, tmp_path):
    """The image's packages are resolved from its public definition, without the image."""
    command = [
        interpreter("3.12"),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--no-warn-conflicts",
    ]
    command += ["--only-binary", ":all:", "--report", str(tmp_path / "image.json")]
    done = subprocess.run([*command, *DEFINITIONS[name]], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    resolved = json.loads((tmp_path / "image.json").read_text())["install"]
    image = {canonicalize_name(one["metadata"]["name"]): Held(one["metadata"]["version"]) for one in resolved}
    listed = {pin: Held(next(iter(found.specifier)).version) for pin, found in pins(f"{name}-image.txt").items()}
    assert not image.keys() & listed.keys(), "the list would replace what the image has"
    environment = make_environment(interpreter("3.12"), tmp_path / "venv", image | listed)
    planned = would_install(environment, [str(wheel)], tmp_path / "r.json", index=False)
    assert planned.keys() == {canonicalize_name(PROJECT["name"])}


def test_every_lock_meets_the_packages_requirements():
    bare = {canonicalize_name(wanted.name): wanted for wanted in asked(PROJECT["dependencies"])}
    extras = PROJECT["optional-dependencies"]
    gpu = {canonicalize_name(wanted.name): wanted for wanted in asked(extras["gpu"])}
    tasks = {canonicalize_name(wanted.name): wanted for wanted in asked(extras["tasks"])}
    for lock, wanted in (("gpu.txt", bare | gpu), ("cpu.txt", bare | gpu), ("tasks.txt", tasks)):
        pinned = pins(lock)
        for name, requirement in wanted.items():
            (exact,) = pinned[name].specifier
            assert exact.operator == "==" and requirement.specifier.contains(exact.version), f"{lock}: {requirement}"


def test_image_locks_name_nothing_that_the_images_contain():
    serving = {"torch", "transformers", "sglang", "sglang-kernel", "triton", "flashinfer-python", "numpy", "scipy"}
    training = {"megatron-core", "transformer-engine", "apex", "slime"}
    assert not set(pins("slime-image.txt")) & (serving | training)
    assert not set(pins("sglang-image.txt")) & serving
    whole = pins("gpu.txt")
    assert all(str(whole[name]) == str(pin) for name, pin in pins("sglang-image.txt").items())
    versions = {str(pin.specifier) for pin in pins("transformer-engine.txt").values()}
    assert len(versions) == 1 and not set(pins("transformer-engine.txt")) & set(whole)


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/slime.md"])
def test_documented_commands_name_files_that_are_there_and_leave_images_alone(page):
    commands = re.findall(r"^[^`|#\n]*pip install [^`\n]*", (ROOT / page).read_text(), re.M)
    assert commands
    for command in commands:
        assert "--no-deps" in command, command
        assert all((ROOT / name).is_file() for name in re.findall(r"-r (\S+)", command)), command
