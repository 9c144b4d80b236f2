"""Malformed input, as tables: each `Case` is one mistake of a user, and `check` says what must happen."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rlspec import cli

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = re.compile(r"^rlspec(?: [a-z]+)?: \S")
NOISE = re.compile(r"Warning: |^  (warnings\.warn|from |import |@)|^\[rank\d+\]:")  # Python's warnings at an import


@dataclass(frozen=True)
class Case:
    """One malformed input.

    name     unique in its table
    act      arguments of `rlspec`, as one string (split at spaces) or a sequence; `{here}` is the case's directory,
             which is also the working directory. Or a function of that directory, which raises, or returns an exit code
    expects  words that the line must hold: what was wrong, what was expected, where
    writes   files by relative path, or a function of the directory that writes them
    lines    1; 0 where only the exit code and the unchanged directory are of interest
    """

    name: str
    act: str | Sequence[str] | Callable[[Path], object]
    expects: tuple[str, ...] = ()
    writes: Mapping[str, str | bytes] | Callable[[Path], object] = field(default_factory=dict)
    lines: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


def ids(cases: Sequence[Case]) -> list[str]:
    """Names for pytest."""
    return [re.sub(r"[^\x21-\x7e]+", "_", case.name)[:80] for case in cases]


def check(case: Case, here: Path, capfd, monkeypatch) -> str:
    """Run the case in `here`, assert all rules of `Case`, and return the printed line."""
    if callable(case.writes):
        case.writes(here)
    else:
        for name, content in case.writes.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.chdir(here)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    before = snapshot(here)
    capfd.readouterr()
    code = _run(case, here)
    printed, errors = capfd.readouterr()
    assert "Traceback" not in errors + printed, errors + printed
    assert code == 2, f"exit code {code}, expected 2, of a user's mistake: {errors}{printed}"
    told = [line for line in errors.splitlines() if line.strip() and not NOISE.search(line)]
    if case.lines:
        assert len(told) == case.lines and OURS.match(told[0]), f"expected one line `rlspec: ...`, got {told}"
        missing = [word for word in case.expects if word not in told[0]]
        assert not missing, f"{missing} not in: {told[0]}"
    assert snapshot(here) == before, "something was written, replaced or removed"
    return told[0] if told else ""


def snapshot(directory: Path) -> dict[str, tuple]:
    """Return the entries below a directory: kind, permissions, inode, and a file's content.

    Bytecode does not count. Python may write it beside a user's function.
    """
    found = {}
    for path in directory.rglob("*"):
        if "__pycache__" not in path.parts:
            about = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(directory))] = (about.st_mode, about.st_ino, content)
    return found


def _run(case: Case, here: Path) -> int:
    """The exit code. What is not a user's mistake is printed as a traceback, as Python does."""
    try:
        return _act(case, here)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


def _act(case: Case, here: Path) -> int:
    if callable(case.act):
        return cli.run(lambda: case.act(here))
    parts = case.act.split() if isinstance(case.act, str) else case.act
    cli.main([part.replace("{here}", str(here)) for part in parts])
    return 0


# ---- a small model and its tokenizer, written in milliseconds -------------------------------------------------------


@cache
def model_files() -> dict[str, bytes]:
    """A whole Hugging Face directory (MiMo's shape, 1 layer, one token per character) as name -> bytes."""
    import runpy

    import tiny_mimo

    from megatron_rlspec.models.hf_files import write_hf
    from megatron_rlspec.tasks.data import load_tokenizer

    with TemporaryDirectory() as scratch:
        root = Path(__file__).parents[2]
        write_tokenizer = runpy.run_path(str(root / "examples/quickstart/make_task.py"))["write_tokenizer"]
        (Path(scratch) / "tokenizer").mkdir()
        write_tokenizer(Path(scratch) / "tokenizer")
        vocabulary = len(load_tokenizer(Path(scratch) / "tokenizer"))
        config = tiny_mimo.config(hidden=16, layers=1, heads=2, kv_heads=1, ffn=16, vocab=vocabulary)
        target = Path(scratch) / "model"
        write_hf(target, config, tiny_mimo.weights(config), tokenizer_from=Path(scratch) / "tokenizer")
        return {path.name: path.read_bytes() for path in target.iterdir()}


def write_model(directory: Path) -> Path:
    """Write that directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in model_files().items():
        (directory / name).write_bytes(content)
    return directory
