"""A bucket of weights reaches a GPU in one copy, from memory of the server, and both loaders read it.

And a push's passes over tensors and bytes are counted, on both sides.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from host_reads import HostReads
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rlspec.push import push
from megatron_rlspec.push.bucket import Bucket, Memory
from megatron_rlspec.push.fingerprint import of_parts
from megatron_rlspec.rollout.sglang.bucket_checks import ServedTensors, check_described
from megatron_rlspec.rollout.sglang.scheduler import bucket_memory
from megatron_rlspec.rollout.sglang.schemas import ReceiveBody, parse


@pytest.fixture
def bucket():
    """Return 40 tensors in two number types, the bucket's bytes, and what SGLang's message says of each tensor."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(4, 6).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(40)}
    packed = Bucket(list(tensors.items()))
    packed.pack(Memory())
    metadata, first = [], 0
    for name, tensor in packed.tensors:
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


class Operators(TorchDispatchMode):
    """Counts operators of torch, and bytes that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].nbytes
        elif func is torch.ops.aten._foreach_copy_.default:
            self.copied += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls of functions, of Python and of C."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self):
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _called(self, frame, event, argument):
        self.count += event in ("call", "c_call")


NAMES = [f"model.layers.{i // 480}.mlp.experts.{i}.gate_proj.weight" for i in range(2_000)]
SHAPES = {name: [8, 8] for name in NAMES}


def prepare(tensors, memory):
    """Do the trainer's part of a push, in four buckets. Returns what is expected, the requests, and the buckets."""
    feed = push.Feed(1 << 40, memory)
    memory._left = 4
    marks, _, _ = push._stream(tensors, [feed], total_of(tensors) // 4)
    requests, buckets = [], list(feed._queue)
    for bucket in buckets:
        requests.append((json.dumps({"group": "rlspec-1", **bucket.described}).encode(), bucket.data()))
    return marks, requests, buckets


def load(requests, held):
    """Do the engine's part: its server's, its scheduler's, which gives tensors to two loaders, and the comparison's."""
    served = ServedTensors(SHAPES, frozenset(NAMES[1::2]))
    for body, data in requests:
        asked = parse(ReceiveBody, body)
        check_described(asked, served, "all")
        sizes = bucket_memory.sizes_of(asked.dtypes, asked.shapes)
        tensors = bucket_memory.tensors_of(data, sizes, asked.names, asked.dtypes, asked.shapes)
        for drafter in (False, True):
            for name, tensor in tensors:
                if (name in served.drafter) == drafter:
                    held[name].copy_(tensor)
    return dict(zip(NAMES, of_parts((held[name], 0) for name in NAMES), strict=True))


def total_of(tensors):
    return sum(tensor.nbytes for _, tensor in tensors)


def test_no_side_of_a_push_takes_another_pass():
    """Counted for each tensor: one more call for each, or one more copy of a bucket, is too many."""
    tensors = [(name, torch.randn(8, 8).bfloat16()) for name in NAMES]
    for kind, trainers, engines in ((Operators, 10.1, 9.1), (Calls, 46.9, 37.9)):
        memory = Memory()
        held = {name: torch.zeros_like(tensor) for name, tensor in tensors}
        with torch._C.DisableTorchFunction(), kind() as trainer:  # a mode that an earlier test left adds calls
            marks, requests, buckets = prepare(tensors, memory)
        with torch._C.DisableTorchFunction(), kind() as engine:
            assert load(requests, held) == marks
        assert len(requests) == len(buckets) == 4
        if kind is Operators:
            assert trainer.copied == engine.copied == total_of(tensors)
        assert trainer.count < trainers * len(NAMES), trainer.count / len(NAMES)
        assert engine.count < engines * len(NAMES), engine.count / len(NAMES)
