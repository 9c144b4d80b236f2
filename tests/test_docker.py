"""The Dockerfiles are read as Docker reads them. They are not built: that needs Docker and their base images."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILES = sorted((ROOT / "tools/docker").glob("*.Dockerfile"))


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments): lines that end with a backslash are joined, comments are dropped."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def read(path: Path) -> list[tuple[str, str]]:
    return instructions(path.read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_enough_to_install(path):
    copied: set[str] = set()
    for word, rest in read(path):
        if word != "COPY":
            continue
        *sources, target = shlex.split(rest)
        for source in sources:
            assert (ROOT / source).exists(), source
            lands = target.rstrip("/") == "." or target.endswith("/") or len(sources) == 1
            assert lands, f"several files need a folder, not {target}"
            copied.add((Path(target) / Path(source).name).as_posix() if target.endswith("/") else source)
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "megatron_rlspec"} <= copied
    for word, rest in read(path):
        for name in re.findall(r"-r (\S+)", rest) if word == "RUN" else ():
            assert name in copied, f"{name} is not copied before it is read"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_pip_replaces_nothing_of_the_image(path):
    installs = [rest for word, rest in read(path) if word == "RUN" and re.search(r"\bpip3? install\b", rest)]
    assert installs[-1].endswith(" .")
    assert all("--no-deps" in rest.split() for rest in installs)
    assert all("--no-build-isolation" in rest.split() for rest in installs if "transformer-engine" in rest)
    assert not any(word in rest for rest in installs for word in ("--upgrade", "--force-reinstall", " -U"))
