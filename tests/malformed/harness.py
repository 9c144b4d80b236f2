"""Malformed input, as tables: each `Case` is one mistake of a user, and `check` says what must happen.

A surface has a file `test_<surface>.py` with a table CASES and

    @pytest.mark.parametrize("case", CASES, ids=ids(CASES))
    def test_one_line(case, tmp_path, capfd, monkeypatch):
        check(case, tmp_path, capfd, monkeypatch)

`check` runs in this process. No case is late on a slow machine; one that hangs is ended after `HANGS` seconds.
"""

from __future__ import annotations

import hashlib
import re
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rlspec import cli

HANGS = 120  # seconds
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
    """Names for pytest; raises ValueError if two cases share one."""
    names = [case.name for case in cases]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"names of cases are used twice: {sorted(repeated)}")
    return [re.sub(r"[^\x21-\x7e]+", "_", name)[:80] for name in names]


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
    changed = difference(before, snapshot(here))
    assert not changed, f"written, replaced or removed: {changed}"
    return told[0] if told else ""


def snapshot(directory: Path) -> dict[str, tuple]:
    """Return the entries below a directory: kind, permissions, and for a file its inode and content.

    Bytecode does not count. Python may write it beside a user's function.
    """
    found = {}
    for path in sorted(directory.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        about = path.lstat()
        entry: tuple = (stat.filemode(about.st_mode),)
        if stat.S_ISREG(about.st_mode):
            entry += (about.st_ino, about.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        found[str(path.relative_to(directory))] = entry
    return found


def difference(before: Mapping[str, tuple], after: Mapping[str, tuple]) -> list[str]:
    """Return the paths that are new, missing or changed."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class _Hangs(BaseException):
    """Raised in the middle of a case that does not end."""


def _run(case: Case, here: Path) -> int:
    """The exit code. What is not a user's mistake is printed as a traceback, as Python does."""

    def stop(*_: object) -> None:
        raise _Hangs

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        return _act(case, here)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except _Hangs:
        print(f"no end after {HANGS} s", file=sys.stderr)
        return 124
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


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
