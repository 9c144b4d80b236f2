"""Safetensors files with checksums: every damage is found."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.headers import INDEX, read_headers
from megatron_rlspec.models.tensor_file import CheckpointError, TensorFile

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.zeros(0, 4),
    "e": torch.tensor([True, False, True]),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    tensor_file.save(TENSORS, path)
    return path.read_bytes()


def read_all(path) -> dict[str, torch.Tensor]:
    with TensorFile(path) as file:
        return {name: file[name] for name in file}


def test_written_files_are_read_by_us_and_by_others(tmp_path, written):
    path = tmp_path / "x.safetensors"
    path.write_bytes(written)
    for found in (read_all(path), load_file(path)):
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    save_file(TENSORS, path)  # another writer's file has no checksums
    assert read_all(path).keys() == TENSORS.keys()


def test_a_flipped_bit_in_any_byte_is_found(tmp_path, written):
    path = tmp_path / "x.safetensors"
    unseen = []
    for position in range(len(written)):
        damaged = bytearray(written)
        damaged[position] ^= 1 << 3 * position % 8
        path.write_bytes(damaged)
        try:
            found = read_all(path)
        except CheckpointError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            continue
        same = all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in TENSORS.items() if n in found)
        if not same or found.keys() != TENSORS.keys():
            unseen.append(position)
    assert not unseen, [written[p - 20 : p + 20] for p in unseen]


def test_exchanged_tensors_are_found(tmp_path):
    path = tmp_path / "x.safetensors"
    pair = {"a": torch.ones(4), "b": torch.zeros(4)}
    checksums = json.dumps({name: tensor_file.checksum(tensor) for name, tensor in pair.items()})
    save_file({"a": pair["b"], "b": pair["a"]}, path, metadata={tensor_file.CHECKSUMS: checksums})
    with pytest.raises(CheckpointError, match="a: its checksum differs"):
        read_all(path)


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise tensor_file.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(OSError) as told:
        tensor_file.save(TENSORS, tmp_path / "x.safetensors")
    assert told.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["no.safetensors", "pipe", "."])
def test_a_path_that_is_no_file_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no such file|found a pipe|found a directory"):
        TensorFile(tmp_path / name)


def test_a_tensor_in_two_files_is_read_from_the_one_that_the_index_names(tmp_path):
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"both": torch.zeros(2), file[0]: torch.ones(2)}, tmp_path / file)
    places = {"both": "a.safetensors", "a": "a.safetensors", "b": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    headers = read_headers(tmp_path)
    assert {name: header.path.name for name, header in headers.items()} == places
