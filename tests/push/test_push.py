"""After a push every engine holds all of it, or the report names the engine, which then serves nothing."""

import threading
import time
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from memory_engine import MemoryEngine
from safetensors.torch import load
from torch.utils._python_dispatch import TorchDispatchMode
from train_ranks import on_ranks

from megatron_rlspec.engine import EngineError
from megatron_rlspec.push import push, update
from megatron_rlspec.push.bucket import Bucket, Memory
from megatron_rlspec.push.fingerprint import compare, fingerprint
from megatron_rlspec.push.push import Pusher, PushError, exporting
from megatron_rlspec.push.update import Update


def weights(seed: int = 0, names: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kinds = ["model.layers.{}.mlp.up_proj.weight", "model.mtp_layers.0.mlp.w{}.weight"]
    return {kinds[i % 2].format(i): torch.randn(8, 16, generator=generator) for i in range(names)}


def source_of(tensors):
    def source(scope):
        for name, tensor in tensors.items():
            if scope == "all" or (scope == "drafter") == ("mtp" in name):
                yield name, tensor

    return source


def holds(engine: MemoryEngine, tensors) -> bool:
    return compare({n: fingerprint(t) for n, t in tensors.items()}, engine.fingerprints()).empty


class Closing(Memory):
    """Memory that notes when a push has ended."""

    closed = 0

    def close(self):
        super().close()
        self.closed += 1


def test_an_update_of_one_engine_leaves_no_piece_of_gpu_memory(monkeypatch):
    engine = MemoryEngine()
    engine.bucket_memory = memory = Closing()
    update.update_weights(engine, 1, weights().items())
    assert memory.closed == 1
    monkeypatch.setattr(engine, "begin_update", Mock(side_effect=EngineError("gone")))
    with pytest.raises(EngineError, match="gone"):
        update.update_weights(engine, 2, weights().items())
    assert memory.closed == 2


def test_a_drafter_that_is_not_trained_may_stay_in_an_engine():
    engine = MemoryEngine()
    engine.tensors = weights(3)
    target = {name: tensor for name, tensor in weights().items() if "mtp" not in name}
    frozen = {name for name in weights() if "mtp" in name}
    assert "has besides" in Pusher({"e": engine}).push(0, source_of(target)).failed["e"]
    pusher = Pusher({"e": engine}, frozen=frozen)
    assert not pusher.push(1, source_of(target)).failed and pusher.compare_with(pusher.engines["e"]).empty
    engine.tensors["model.layers.0.mlp.up_proj.weight"] += 1
    assert pusher.compare_with(pusher.engines["e"]).differing == ("model.layers.0.mlp.up_proj.weight",)
    assert not pusher.push(2, source_of(weights())).failed  # a drafter that is sent is compared
    engine.tensors[min(frozen)] += 1
    assert pusher.compare_with(pusher.engines["e"]).differing == (min(frozen),)


def test_an_engine_that_breaks_is_named_and_serves_nothing():
    engines = {"good": MemoryEngine("good"), "bad": MemoryEngine("bad")}
    pusher = Pusher(engines)
    pusher.push(0, source_of(weights(0)))
    engines["bad"].fail_at = 5
    report = pusher.push(1, source_of(weights(1)))
    assert report.failed == {"bad": "bad: connection lost after 5 tensors of version 1"}
    assert holds(engines["good"], weights(1))
    with pytest.raises(EngineError):
        engines["bad"].generate([], None)
    # The next push restores it. It sends all tensors, even with scope "drafter".
    engines["bad"].fail_at = None
    new = {n: t if "mtp" not in n else t + 1 for n, t in weights(1).items()}
    report = pusher.push(2, source_of(new), scope="drafter")
    assert report.scope == "all" and not report.failed
    assert all(holds(engine, new) for engine in engines.values())


class BucketEngine(MemoryEngine):
    """Takes packed buckets, as SGLang's client does, and reads each with the safetensors library."""

    def __init__(self, name: str, memory: Memory) -> None:
        super().__init__(name)
        self.bucket_memory = memory

    def send(self, bucket):
        super().send(Bucket(list(load(bucket.file().numpy().tobytes()).items())))


def test_packed_buckets_serve_all_engines_and_a_flipped_bit_is_named(monkeypatch):
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 3 * 8 * 16 * 4)
    memory = Memory(headed=True)
    engines = {name: BucketEngine(name, memory) for name in ("good", "damaged", "bad")}
    pusher = Pusher(engines)

    def tensors(seed):
        return {**weights(seed), "model.norm.weight": torch.randn(7).bfloat16(), "model.scale": torch.randn(3).double()}

    def flipped(name, tensor):
        if name == "model.norm.weight":
            tensor.view(torch.int16)[4] ^= 1
        return name, tensor

    for broken in (False, True, False):  # memory of a failed push serves the next one
        engines["damaged"].wire = flipped if broken else lambda name, tensor: (name, tensor)
        engines["bad"].fail_at = 5 if broken else None
        new = tensors(int(broken))
        report = pusher.push(int(broken), source_of(new))
        lost = "bad: connection lost after 5 tensors of version 1"
        assert report.failed == ({"damaged": "holds otherwise model.norm.weight", "bad": lost} if broken else {})
        assert holds(engines["good"], new)
        poisoned = {**new, "model.norm.weight": torch.full((7,), float("nan"), dtype=torch.bfloat16)}
        with pytest.raises(PushError, match="model.norm.weight holds NaN"):
            pusher.push(9, source_of(poisoned))
        assert not any(engine.serving for engine in engines.values())


def test_a_bucket_travels_while_the_next_one_is_made(monkeypatch):
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 3 * 8 * 16 * 4)
    engine = BucketEngine("e", Memory(headed=True))
    came = threading.Event()
    engine.wire = lambda name, tensor: came.set() or (name, tensor)

    def source(scope):
        for i, named in enumerate(weights().items()):
            assert i < 5 or came.wait(60)  # the sixth tensor is the last one of the second bucket
            yield named

    assert not Pusher({"e": engine}).push(0, source).failed and holds(engine, weights())


def test_engines_of_joint_memory_take_a_bucket_by_one_call_and_fail_together(monkeypatch):
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 3 * 8 * 16 * 4)
    calls = []

    class Joint(BucketEngine):
        def send(self, bucket, *others):
            calls.append({engine.name for engine in (self, *others)})
            for engine in (self, *others):
                BucketEngine.send(engine, bucket)

    memory = Memory(headed=True, joint=True)
    engines = {name: Joint(name, memory) for name in "abc"} | {"alone": MemoryEngine("alone")}
    pusher = Pusher(engines)
    assert not pusher.push(0, source_of(weights())).failed and calls == [set("abc")] * 4
    engines["c"].begin_update = lambda version, scope: 1 / 0
    with pytest.raises(ZeroDivisionError):  # a mistake of a program, after the exporter's end
        pusher.push(1, source_of(weights(1)))
    assert calls[4:] == [set("ab")] * 4 and holds(engines["a"], weights(1)) and not engines["c"].serving
    del engines["c"]
    engines["b"].fail_at = 5
    report = pusher.push(2, source_of(weights(2)))
    lost = "b: connection lost after 5 tensors of version 2"
    assert report.failed == {"a": lost, "b": lost} and holds(engines["alone"], weights(2))
    assert not engines["a"].serving and report.engines["a"].sent_bytes == report.total_bytes / 2


def test_scope_drafter_sends_the_drafter_only():
    engine = MemoryEngine()
    pusher = Pusher({"e": engine})
    pusher.push(0, source_of(weights()))
    new = {n: t + 1 if "mtp" in n else t for n, t in weights().items()}
    report = pusher.push(1, source_of(new), scope="drafter")
    assert engine.sessions[-1] == (1, "drafter", 6) and not report.failed
    assert holds(engine, new)
    engine.tensors["model.layers.0.mlp.up_proj.weight"] += 1  # the rest is compared too
    assert "layers.0" in pusher.push(2, source_of(new), scope="drafter").failed["e"]


def test_exporter_mistakes():
    engine = MemoryEngine()
    pusher = Pusher({"e": engine})
    with pytest.raises(PushError, match="gave lm_head.weight twice"):
        pusher.push(0, lambda scope: [("lm_head.weight", torch.ones(1))] * 2)
    with pytest.raises(PushError, match="gave no tensor"):
        pusher.push(0, lambda scope: [])

    def dies(scope):
        yield from list(weights().items())[:3]
        raise RuntimeError("rank 3 is gone")

    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        pusher.push(0, dies)
    assert not engine.serving


class Calls(TorchDispatchMode):
    """Counts what reaches a device: launches, and bytes that are copied and read."""

    def __init__(self):
        super().__init__()
        self.launches = self.views = self.copied = self.read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.is_view:
            self.views += 1
        elif func is not torch.ops.aten.empty.memory_format:
            self.launches += 1
        if func is torch.ops.aten._foreach_copy_.default:
            self.copied += sum(tensor.nbytes for tensor in args[0])
        elif func is torch.ops.aten._foreach_norm.Scalar:
            self.read += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def test_many_tensors_of_a_gpu_take_a_few_calls_a_bucket(monkeypatch):
    """On meta tensors, without fingerprints: each byte is read and copied once."""

    class Meta(Memory):
        def _make(self, needed):
            return torch.empty(needed, dtype=torch.uint8, device="meta")

    def checked(tensors):
        assert real(tensors).shape == (len(tensors),)
        return torch.ones(len(tensors), dtype=torch.bool)

    real = push.finite_of
    monkeypatch.setattr(push, "finite_of", checked)
    monkeypatch.setattr(push, "fingerprints", lambda tensors: [1] * len(tensors))
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 2 << 30)
    count, made = 4_400, []
    engine = BucketEngine("e", Meta("meta"))
    engine.send = lambda bucket: made.append(bucket.bytes)
    one = torch.empty(4096, 1970, dtype=torch.bfloat16, device="meta")
    tensors = [(f"layers.{i}.weight", one) for i in range(count)]
    with Calls() as calls, Update({"e": engine}, 0, "all") as sent:
        marks, total, _ = push._stream(tensors, sent)
    assert len(marks) == count and 34 <= len(made) <= 36
    assert calls.copied == calls.read == total == sum(made) == sent.sent_bytes["e"]
    assert calls.launches <= 11 * len(made) and calls.views <= 5.1 * count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_find_what_is_not_finite(monkeypatch, dtype):
    """The way of GPUs, with a CPU's tensors. A sum of finite numbers can be infinite, and is looked at again."""
    monkeypatch.setattr(push, "finite_of", push.finite_sums)
    tensors = [torch.ones(2, dtype=dtype), torch.full((4, 4), torch.finfo(dtype).min, dtype=dtype), torch.ones(0)]
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensors.append(torch.ones(3, 5, dtype=dtype))
        tensors[-1][1, 2] = bad
    assert push._finite(tensors) == [True, True, True, False, False, False]


def test_the_exporter_is_read_to_its_end_even_if_every_engine_fails(monkeypatch):
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 1)
    read = []

    def source(scope):
        for name, tensor in weights(0, 40).items():
            read.append(name)
            yield name, tensor

    engines = {"a": MemoryEngine(), "b": MemoryEngine()}
    for engine in engines.values():
        engine.fail_at = 1
    report = Pusher(engines).push(0, source)
    assert len(report.failed) == 2 and len(read) == 40


def test_the_exporter_runs_ahead_by_a_bucket(monkeypatch):
    """And so an engine that is slow delays the others: all have a bucket before the next one leaves."""
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 512)
    sent = []
    gap = []

    class Slow(MemoryEngine):
        def send(self, bucket):
            time.sleep(0.001)
            super().send(bucket)
            sent.extend(bucket.names)

    engines = {"slow": Slow(), "fast": MemoryEngine()}

    def source(scope):
        for i, pair in enumerate(weights(0, 60).items()):
            yield pair
            gap.append((i + 1 - len(sent), engines["fast"].received - len(sent)))

    engines["fast"].received = 0
    assert not Pusher(engines).push(0, source).failed and len(sent) == 60
    ahead, apart = map(max, zip(*gap, strict=True))
    assert ahead <= 3 and apart <= 1  # one travels, one is made, and one comes out of the exporter


def collective_export(scope):
    """Every rank contributes; rank 0 yields the sum."""
    for name, tensor in weights(dist.get_rank()).items():
        if scope == "drafter" and "mtp" not in name:
            continue
        dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            yield name, tensor


def pushes_twice(fail: bool):
    dist.init_process_group("gloo")
    engine = MemoryEngine()
    outcome = "served"
    pusher = Pusher({"e": engine})
    try:
        with exporting(collective_export) as source:
            if source is not None:
                assert not pusher.push(0, source).failed
                assert pusher.push(1, source, scope="drafter").scope == "drafter"
                if fail:
                    raise RuntimeError("rank 0 has had enough")
    except (RuntimeError, PushError) as error:
        outcome = f"{type(error).__name__}: {error}"
    dist.barrier()
    dist.destroy_process_group()
    return outcome, engine.tensors


@pytest.mark.parametrize("fail", [False, True])
def test_other_ranks_follow_as_often_as_rank_0_pushes(fail):
    (outcome, held), (followed, nothing) = on_ranks(2, pushes_twice, fail)
    first = weights(0)
    second = weights(1)
    assert nothing == {} and all(torch.equal(held[name], first[name] + second[name]) for name in first)
    if fail:
        assert outcome == "RuntimeError: rank 0 has had enough"
        assert followed == "PushError: the push failed on rank 0"
    else:
        assert outcome == followed == "served"
