"""`rlspec convert`: sources that are damaged or not what they say, and targets that cannot be made."""

import os
import pickle
import resource
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Case, check, ids, model_files, write_model

from megatron_rlspec import cli
from megatron_rlspec.commands import convert as command
from megatron_rlspec.conversion import torch_dist
from megatron_rlspec.conversion.convert import convert, plan

TO_MEGATRON = "convert hf out"
TO_HF = "convert megatron out"


@cache
def megatron_files() -> dict[str, bytes]:
    """The harness's model as a Megatron checkpoint, relative path -> bytes."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        write_model(Path(scratch) / "hf")
        convert(plan(Path(scratch) / "hf", Path(scratch) / "megatron"))
        root = Path(scratch) / "megatron"
        return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def hf(weights: bytes | None = None) -> Callable[[Path], None]:
    """Write the model, with other weights if they are given."""

    def write(here: Path) -> None:
        write_model(here / "hf")
        if weights:
            (here / "hf/model.safetensors").write_bytes(weights)

    return write


def megatron(edit: Callable[[Path, Any], object]) -> Callable[[Path], None]:
    """Write the Megatron checkpoint, then `edit(step, index)`: it changes files or the index, or returns another."""

    def write(here: Path) -> None:
        for name, content in megatron_files().items():
            (here / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
            (here / "megatron" / name).write_bytes(content)
        step = here / "megatron/release"
        index = pickle.loads((step / ".metadata").read_bytes())
        another = edit(step, index)
        (step / ".metadata").write_bytes(another if isinstance(another, bytes) else pickle.dumps(index))

    return write


def flipped(step: Path, _: Any) -> None:
    """Change a bit of a tensor, which begins at most 64 bytes behind its name."""
    file = max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[data.index(b"/data/0") + 100] ^= 16
    file.write_bytes(data)


class Owned:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def another_part(content: object) -> Callable[[Path], None]:
    """Put `content` where the index expects the embedding, with lengths that fit."""

    def edit(step: Path, index: Any) -> None:
        torch.save(content, step / "evil.distcp")
        for key, info in index.storage_data.items():
            if key.fqn == EMBEDDING:
                info.relative_path, info.offset = "evil.distcp", 0
                info.length = (step / "evil.distcp").stat().st_size

    return megatron(edit)


def without_places(_: Path, index: Any) -> None:
    index.storage_data = None


def elsewhere(step: Path, index: Any) -> None:
    for file in step.glob("*.distcp"):
        file.rename(step.parent / file.name)
    for info in index.storage_data.values():
        info.relative_path = f"../{info.relative_path}"


def longer(_: Path, index: Any) -> None:
    for info in index.storage_data.values():
        info.length = 1 << 60


def larger(_: Path, index: Any) -> None:
    index.state_dict_metadata[EMBEDDING].size = torch.Size([1 << 50, 16])


def of_int8(_: Path, index: Any) -> None:
    index.state_dict_metadata[EMBEDDING].properties.dtype = torch.int8


EMBEDDING = "embedding.word_embeddings.weight"
WEIGHTS = model_files()["model.safetensors"]
CASES = [
    Case("no arguments", "convert", ("required: source, target",)),
    Case("no source", "convert nosuch out --to megatron", ("nosuch: no such directory",)),
    Case("a file", "convert x.gguf out", ("x.gguf: not a directory", "tools/gguf_to_hf.py"), {"x.gguf": ""}),
    Case(
        "all checkpoints of a run",
        "convert checkpoints out",
        ("holds a run's checkpoints", "such as checkpoints/step-000003"),
        {f"checkpoints/step-00000{step}/layout.json": "{}" for step in (2, 3)},
    ),
    Case("target exists", "convert hf hf", ("hf: exists already",), hf()),
    Case("drafter twice", "convert hf out --add-mtp", ("has a drafter already",), hf()),
    Case(
        "weights with a flipped bit",
        TO_MEGATRON,
        ("model.safetensors", "checksum differs", "damaged"),
        hf(WEIGHTS[:-3] + bytes([WEIGHTS[-3] ^ 4]) + WEIGHTS[-2:]),
    ),
    Case("weights are a pickle", TO_MEGATRON, ("truncated or not safe",), hf(pickle.dumps(Owned()))),
    Case(
        "tracker junk",
        TO_HF,
        ("latest_checkpointed_iteration.txt", "'../../etc'", "expected `release`"),
        megatron(lambda step, _: (step.parent / torch_dist.TRACKER).write_text("../../etc")),
    ),
    Case("index of no pickle", TO_HF, (".metadata: unreadable index",), megatron(lambda *_: b"\x80\x04no")),
    Case("index evil", TO_HF, ("refers to posix.mkdir",), megatron(lambda *_: pickle.dumps(Owned()))),
    Case("index without places", TO_HF, (".metadata: not the index",), megatron(without_places)),
    Case("path out of the directory", TO_HF, ("a file beside it",), megatron(elsewhere)),
    Case("length huge", TO_HF, (".distcp: truncated",), megatron(longer)),
    Case("size huge", TO_HF, ("is not whole",), megatron(larger)),
    Case("dtype changed", TO_HF, ("expected torch.int8",), megatron(of_int8)),
    Case("data flipped", TO_HF, (".distcp", "damaged"), megatron(flipped)),
    Case("data evil", TO_HF, ("evil.distcp", "damaged, or something else than a tensor"), another_part(Owned())),
    Case("data of another shape", TO_HF, ("of shape [3]",), another_part(torch.zeros(3))),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    megatron_files()
    check(case, tmp_path, capfd, monkeypatch)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, capfd):
    """A limit on the size of files replaces a full disk."""
    hf()(tmp_path)
    argv = [str(tmp_path / "hf"), str(tmp_path / "out")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        code = cli.run(lambda: command.main(argv))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    told = capfd.readouterr().err
    assert code in (1, 2) and told.startswith("rlspec: ") and told.count("\n") == 1, told
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert command.main(argv) == 0 and (tmp_path / "out/release/config.json").exists()
