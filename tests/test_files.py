"""Files are read with limits, and written whole or not at all; groups are read back from bytes."""

import errno
import os
from contextlib import redirect_stderr

import msgspec
import numpy as np
import pytest

from megatron_rlspec import files
from megatron_rlspec.files import FileError
from megatron_rlspec.records.recorder import Recorder, read_records
from megatron_rlspec.types import Group, Prompt, Sample
from megatron_rlspec.wire import decode, encode


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "the file is empty"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b"\xff\xfe{}", "not UTF-8 text (byte 0: 0xff)"),
    ],
)
def test_text_that_is_not_json(tmp_path, content, part):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FileError) as told:
        files.read_json(path)
    assert str(told.value).startswith(f"{path}: ") and part in str(told.value) and "\n" not in str(told.value)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert files.read_json(tmp_path / "x.json") == {"a": 1}


def test_only_files_of_a_size_are_read(tmp_path):
    (tmp_path / "big").write_bytes(b"x" * 11)
    for name, part in ((".", "directory"), ("no", "No such file")):
        with pytest.raises(FileError, match=part):
            files.read_text(tmp_path / name)
    with pytest.raises(FileError, match="11 bytes, expected at most 10"):
        files.read_text(tmp_path / "big", most=10)


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "x"
    files.write(path, "one")
    files.write(path, b"two")
    assert path.read_bytes() == b"two"

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left") as told:
        files.write(path, "three")
    assert told.value.filename == str(path) and told.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


def test_a_symbolic_link_is_kept(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_devices_are_written_to_and_not_replaced():
    before = os.stat("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        files.write("/dev/full", "x")
    with pytest.raises(FileError, match="/dev/full: cannot be written: No space left on device"):
        files.write_output("/dev/full", "x")
    files.write("/dev/null", "x")
    assert os.stat("/dev/full").st_rdev == before.st_rdev and os.stat("/dev/full").st_ino == before.st_ino


def test_an_output_replaces_no_input(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "hard").hardlink_to(tmp_path / "c.toml")
    (tmp_path / "soft").symlink_to("c.toml")
    (tmp_path / "there").symlink_to("model", target_is_directory=True)
    reads = {"the file": tmp_path / "c.toml", "the model": model, "nothing": None, "gone": tmp_path / "gone"}
    for name in ("c.toml", "hard", "soft", "model/../c.toml", "model/config.json", "there/config.json"):
        with pytest.raises(FileError, match="this file is read: the (file|model); name another file"):
            files.check_output(tmp_path / name, reads)
    files.check_output(model / "new.json", reads)
    with pytest.raises(FileError, match="cannot be written"):
        files.check_output(tmp_path / "no/file")
    files.check_output("/dev/null", {"null": "/dev/null"})


def test_a_line_that_nobody_can_read_ends_nothing(tmp_path):
    """The reader of a pipe ends at Ctrl-C, too; a terminal is closed; the disk of a log is full."""
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (os.fdopen(writer, "w"), open("/dev/full", "w")):  # noqa: SIM115
        with stream:
            files.tell("a step", stream)
            files.tell("another step", stream)
            with redirect_stderr(stream):
                Recorder(tmp_path).event("push", "is late")
    assert [row["message"] for row in read_records(tmp_path / "events.jsonl")] == ["is late", "is late"]


def groups():
    prompt = Prompt(3, np.array([1, 2]), "label", "text", {"a": 1})
    tokens = np.array([1, 2, 3])
    zeros = np.zeros(3, np.float32)
    return [Group(prompt, [Sample("r.", prompt, tokens, zeros, zeros)])]


def test_groups_come_back():
    [group] = decode(encode(groups()), list[Group])
    assert group.prompt.tokens.tolist() == [1, 2] and group.samples[0].behaviour_logprobs.dtype == np.float32


@pytest.mark.parametrize("data", [b"", encode(groups())[:-1], encode(3), encode([{"prompt": 3}])])
def test_other_bytes_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode(data, list[Group])
