"""A bucket of weights reaches a GPU in one copy, from a file and from shared memory, and both loaders read it there."""

from types import SimpleNamespace

import pytest
import torch
from host_reads import HostReads

from megatron_rlspec.push.bucket import Bucket, Memory
from megatron_rlspec.rollout.sglang.bucket_checks import Entry
from megatron_rlspec.rollout.sglang.scheduler import bucket_file


@pytest.fixture
def bucket():
    """Return 40 tensors in two number types, packed, and their places."""
    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(4, 6).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(40)}
    packed = Bucket(list(tensors.items()))
    packed.pack(Memory())
    entries, at = [], packed.file().numel() - packed.bytes
    for name, tensor in packed.tensors:
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), at, at + tensor.nbytes))
        at += tensor.nbytes
    return tensors, packed.file(), entries


@pytest.mark.parametrize("way", ["file", "shared memory"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_bucket_is_copied_once_for_both_loaders(bucket, way, device, tmp_path, monkeypatch):
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    tensors, content, entries = bucket
    monkeypatch.setattr(bucket_file.landing, "_kept", torch.empty(0, dtype=torch.uint8))
    metadata = [
        FlattenedTensorMetadata(e.name, torch.Size(e.shape), e.dtype, e.first, e.end, e.end - e.first) for e in entries
    ]
    (tmp_path / "bucket").write_bytes(content.numpy().tobytes())
    payload = bucket_file.of_file(str(tmp_path / "bucket"), len(content), entries) if way == "file" else b"pickled"
    worker = SimpleNamespace(model_runner=SimpleNamespace(device=device))
    with HostReads() as reads:
        held = [{n: torch.zeros_like(t).to(device) for n, t in tensors.items()} for _ in ("target", "drafter")]
        reads.found.clear()
        for _ in range(2):  # the second bucket lands in the memory of the first one
            found = bucket_file.read(lambda *_: {"flattened_tensor": content, "metadata": metadata}, worker, [payload])
            for model in held:
                for name, tensor in FlattenedTensorBucket(**found).reconstruct_tensors():
                    model[name].copy_(tensor)
        assert list(reads.found.values()) == ([2] if device == "cuda" else []), reads.found
        assert all(torch.equal(reads.take(model[n]), tensors[n]) for model in held for n in tensors)
    assert bucket_file.landing._kept.numel() == (0 if (way, device) == ("shared memory", "cpu") else len(content))
