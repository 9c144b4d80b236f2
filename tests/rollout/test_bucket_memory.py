"""A bucket of weights reaches a GPU in one copy, from memory of the server, and both loaders read it."""

from types import SimpleNamespace

import pytest
import torch
from host_reads import HostReads

from megatron_rlspec.push.bucket import Bucket, Memory
from megatron_rlspec.rollout.sglang.scheduler import bucket_memory


@pytest.fixture
def bucket():
    """Return 40 tensors in two number types, the bucket's bytes, and what SGLang's message says of each tensor."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(4, 6).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(40)}
    ordered = Bucket(list(tensors.items())).tensors
    packed = Bucket(ordered, Memory())
    metadata, first = [], 0
    for name, tensor in ordered:
        end = first + tensor.nbytes
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, first, end, tensor.nbytes))
        first = end
    return tensors, packed.data(), metadata


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_bucket_is_copied_once_for_both_loaders(bucket, device, monkeypatch):
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    tensors, content, metadata = bucket
    monkeypatch.setattr(bucket_memory.landing, "_kept", torch.empty(0, dtype=torch.uint8))
    worker = SimpleNamespace(model_runner=SimpleNamespace(device=device))
    with HostReads() as reads:
        models = [{n: torch.zeros_like(t).to(device) for n, t in tensors.items()} for _ in ("target", "drafter")]
        reads.found.clear()
        for _ in range(2):  # the second bucket lands in the memory of the first one
            message = bucket_memory.read(
                lambda *_: {"flattened_tensor": content, "metadata": metadata}, worker, [b"pickled"]
            )
            for model in models:
                for name, tensor in FlattenedTensorBucket(**message).reconstruct_tensors():
                    model[name].copy_(tensor)
        assert list(reads.found.values()) == ([2] if device == "cuda" else []), reads.found
        assert all(torch.equal(reads.take(model[n]), tensors[n]) for model in models for n in tensors)
    assert bucket_memory.landing._kept.numel() == (0 if device == "cpu" else len(content))
