"""`rlspec convert`: sources that are damaged or not what they say, and targets that cannot be made."""

import io
import os
import pickle
import resource
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

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


def megatron(edit: Callable[[Path], object]) -> Callable[[Path], None]:
    """Write the Megatron checkpoint, then `edit(directory)`."""

    def write(here: Path) -> None:
        for name, content in megatron_files().items():
            (here / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
            (here / "megatron" / name).write_bytes(content)
        edit(here / "megatron")

    return write


def replaced(name: str, content: bytes | str) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return megatron(lambda root: (root / name).write_bytes(data))


def biggest(root: Path) -> Path:
    return max(root.rglob("*.distcp"), key=lambda file: file.stat().st_size)


def flipped(root: Path) -> None:
    """Change a bit of a tensor, which begins at most 64 bytes behind its name."""
    file = biggest(root)
    data = bytearray(file.read_bytes())
    data[data.index(b"/data/0") + 100] ^= 16
    file.write_bytes(data)


class Owned:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def part_of(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def another_part(content: object) -> Callable[[Path], None]:
    """Put `content` where the index expects the embedding, with lengths that fit."""

    def edit(root: Path) -> None:
        with_index(lambda index, file: _redirect(index, file, part_of(content)))(root.parent)

    return megatron(edit)


def _redirect(index, directory: Path, data: bytes) -> None:
    (directory / "evil.distcp").write_bytes(data)
    for key, info in index.storage_data.items():
        if key.fqn == "embedding.word_embeddings.weight":
            info.relative_path, info.offset, info.length = "evil.distcp", 0, len(data)


def with_index(edit: Callable[[object, Path], object]) -> Callable[[Path], None]:
    """Write the Megatron checkpoint with an index that `edit(index, directory)` has changed."""

    def change(root: Path) -> None:
        file = root / "release" / ".metadata"
        index = pickle.loads(file.read_bytes())
        edit(index, file.parent)
        foreign(pickle.dumps(index))(root)

    return megatron(change)


def foreign(index: bytes) -> Callable[[Path], object]:
    """Put another index."""

    def change(root: Path) -> None:
        (root / INDEX).write_bytes(index)

    return change


def embedding(index):
    return index.state_dict_metadata["embedding.word_embeddings.weight"]


def set_where(**values: object) -> Callable[[Path], None]:
    def edit(index, _) -> None:
        for info in index.storage_data.values():
            for name, value in values.items():
                setattr(info, name, value)

    return with_index(edit)


WEIGHTS = model_files()["model.safetensors"]
INDEX = "release/.metadata"
CASES = [
    Case("no arguments", "convert", ("required: source, target",)),
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
        replaced(torch_dist.TRACKER, "../../etc"),
    ),
    Case("index of no pickle", TO_HF, (".metadata: unreadable index",), replaced(INDEX, b"\x80\x04no")),
    Case("index evil", TO_HF, (".metadata", "refers to posix.mkdir"), megatron(foreign(pickle.dumps(Owned())))),
    Case("path out of the directory", TO_HF, ("a file beside it",), set_where(relative_path="../../../etc/passwd")),
    Case("length huge", TO_HF, (".distcp: truncated",), set_where(length=1 << 60)),
    Case("size huge", TO_HF, ("is not whole",), with_index(
        lambda i, _: setattr(embedding(i), "size", torch.Size([1 << 50, 16])))),
    Case("dtype changed", TO_HF, ("expected torch.int8",), with_index(
        lambda i, _: setattr(embedding(i).properties, "dtype", torch.int8))),
    Case("data flipped", TO_HF, (".distcp", "damaged"), megatron(flipped)),
    Case("data evil", TO_HF, ("evil.distcp", "damaged, or something else than a tensor"), another_part(Owned())),
    Case("data of another shape", TO_HF, ("of shape [3]",), another_part(torch.zeros(3))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    megatron_files()
    check(case, tmp_path, capfd, monkeypatch)


def test_good_ones_are_converted(tmp_path):
    megatron(lambda root: None)(tmp_path)
    hf()(tmp_path)
    for source in ("megatron", "hf"):
        assert command.main([str(tmp_path / source), str(tmp_path / f"from-{source}")]) == 0


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
