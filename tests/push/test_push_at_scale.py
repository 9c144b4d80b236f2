"""A push of a 355B model to 64 engines of 8 GPUs, in virtual time: the real push code, with stand-ins for links.

44,000 tensors of 710 GB lie on torch's meta device, so layouts and copies run without bytes. Threads are those of the
push code, but one runs at a time and time passes only when all of them wait; so every run takes the same virtual time.
"""

import heapq
import itertools
import math
import threading
import time

import pytest
import torch

from megatron_rlspec import engine
from megatron_rlspec.push import push, update
from megatron_rlspec.push.bucket import Memory
from megatron_rlspec.rollout.sglang.client import transport
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast

GB = 1e9
REQUEST = 0.004  # seconds of one request to an engine: HTTP, its scheduler's loop
GATHER = 150 * GB  # bytes/s at which full tensors come together on rank 0, over NVLink
CHECKS = 400 * GB  # bytes/s of fingerprints and finite checks in a GPU's memory
LOAD = 600 * GB  # bytes/s at which a rank copies its part into place


class Clock:
    """Runs one thread at a time. When all wait, time goes on to the first that sleeps."""

    def __init__(self):
        self.now = 0.0
        self.turn = threading.Lock()
        self.ready: list[Task] = []
        self.sleeping: list[tuple[float, int, Task]] = []
        self.order = itertools.count()
        self.current = Task()

    def block(self):
        """Give the turn away. Returns when `wake` was called for this thread and its turn has come."""
        task = self.current
        self.pass_on()
        task.go.acquire()
        self.current = task

    def pass_on(self):
        if not self.ready:
            self.now, _, task = heapq.heappop(self.sleeping)
            self.ready.append(task)
        self.ready.pop(0).go.release()

    def wake(self, task):
        self.ready.append(task)

    def sleep(self, seconds):
        heapq.heappush(self.sleeping, (self.now + seconds, next(self.order), self.current))
        self.block()


class Task:
    def __init__(self):
        self.go = threading.Semaphore(0)


clock = Clock()


class Condition:
    """As threading.Condition; no lock is needed, because one thread runs at a time."""

    def __init__(self):
        self.waiting = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_for(self, predicate):
        while not predicate():
            self.waiting.append(clock.current)
            clock.block()

    def notify_all(self):
        for task in self.waiting:
            clock.wake(task)
        self.waiting.clear()


class Future:
    def __init__(self):
        self.changed = Condition()
        self.ended = False
        self.error = None

    def result(self):
        self.changed.wait_for(lambda: self.ended)
        if self.error:
            raise self.error
        return self.value

    def exception(self):
        return self.error


class Executor:
    def __init__(self, workers):
        self.submitted = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for future in self.submitted:
            future.changed.wait_for(lambda future=future: future.ended)

    def submit(self, call, *arguments, **options):
        future = Future()
        task = Task()

        def run():
            task.go.acquire()
            clock.current = task
            try:
                future.value = call(*arguments, **options)
            except Exception as error:
                future.error = error
            future.ended = True
            future.changed.notify_all()
            clock.pass_on()

        threading.Thread(target=run, daemon=True).start()
        clock.wake(task)
        self.submitted.append(future)
        return future

    def map(self, call, items):
        return [future.result() for future in [self.submit(call, item) for item in items]]


class Link:
    """A token bucket: `rate` bytes a second, and up to `burst` bytes at once after a rest."""

    def __init__(self, rate, burst):
        self.rate = rate
        self.burst = burst
        self.tokens = burst
        self.at = 0.0
        self.sent = 0

    def send(self, size):
        self.tokens = min(self.burst, self.tokens + (clock.now - self.at) * self.rate) - size
        self.at = clock.now
        self.sent += size
        if self.tokens < 0:
            clock.sleep(-self.tokens / self.rate)


class Broadcast(GroupBroadcast):
    """NCCL's pipelined broadcast: every link carries every byte once, all at the same time."""

    def __init__(self, link, memory):
        super().__init__(backend="gloo")
        self.memory = memory
        self.link = link
        self.groups = 0
        self.came = 0  # engines that wait for the bucket
        self.changed = Condition()

    def _join(self, posts, threads):
        self.groups += 1
        self._name = "rlspec-1"

    def _broadcast(self, data):
        self.changed.wait_for(lambda: self.came == len(self._members))
        self.came = 0
        self.link.send(data.numel())

    def take(self):
        """Take part in a broadcast as an engine."""
        self.came += 1
        self.changed.notify_all()


class Engine(SGLangEngine):
    """The real client of an engine, of which only the requests go nowhere."""

    def __init__(self, number, shapes, marks, way):
        super().__init__(f"http://engine-{number}", transport=way)
        self.answers = {
            "control/shapes": {"shapes": shapes, "drafter": [], "unnamed": ""},
            "control/fingerprints": {"fingerprints": marks},
        }
        self.received = 0
        self.before = 0  # bytes of the bucket that is not loaded yet

    def post(self, path, **options):
        clock.sleep(REQUEST)
        if path == "weights/receive":
            what = options["json"]
            self.received += len(what["names"])
            self._transport.take()
            self._load(sum(2 * math.prod(shape) for shape in what["shapes"]))
        elif path == "weights/end":
            self._load(0)
        return self.answers.get(path, {"session": "0"})

    def _load(self, following):
        """Load the bucket before, while the following one is received."""
        clock.sleep(self.before / LOAD)
        self.before = following


class Counted(Memory):
    """Counts the bytes of buckets that rank 0 holds."""

    held = 0
    peak = 0

    def _make(self, needed):
        Counted.held += needed
        Counted.peak = max(Counted.peak, Counted.held)
        return torch.empty(needed, dtype=torch.uint8, device="meta")

    def close(self):
        Counted.held -= sum(piece.numel() for piece in self._pieces)
        super().close()


def experts(count):
    """Return `count` meta tensors of 710 GB together, in bfloat16."""
    columns = int(710 * GB / 2 / count / 4096)
    return {f"model.layers.{i // 480}.mlp.experts.{i}.weight": (4096, columns) for i in range(count)}


@pytest.fixture
def virtual(monkeypatch):
    """Replace threads by the clock's, and give buckets the size that they have on a GPU."""
    global clock
    clock = Clock()
    for module in (engine, update, transport):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Executor)
    monkeypatch.setattr(update, "bucket_bytes", lambda memory: 2 << 30)

    def marks(tensors):
        clock.sleep(sum(tensor.nbytes for tensor in tensors) / CHECKS)
        return [tensor.numel() for tensor in tensors]

    monkeypatch.setattr(push, "fingerprints", marks)
    monkeypatch.setattr(push, "_finite", lambda tensors: [True] * len(tensors))
    Counted.held = Counted.peak = 0


def exported(shapes):
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        clock.sleep(tensor.nbytes / GATHER)
        yield name, tensor


def pushed(count, engines, link):
    """Push once; return engines, report, virtual seconds and seconds of this process's CPU."""
    shapes = experts(count)
    marks = {name: rows * columns for name, (rows, columns) in shapes.items()}
    way = Broadcast(link, Counted("meta", joint=True))
    served = {
        str(n): Engine(n, {name: list(shape) for name, shape in shapes.items()}, marks, way) for n in range(engines)
    }
    cpu = time.process_time()
    report = push.Pusher(served).push(1, lambda scope: exported(shapes))
    return served, way, report, clock.now, time.process_time() - cpu


@pytest.mark.slow
@pytest.mark.parametrize(("count", "engines"), [(2_200, 8), (44_000, 64)], ids=["small", "355B"])
def test_a_push_takes_seconds_and_little_memory(virtual, count, engines):
    link = Link(50 * GB, burst=64e6)  # 400 Gbit/s
    served, way, report, seconds, cpu = pushed(count, engines, link)
    assert not report.failed and report.tensors == count
    assert all(engine.received == count for engine in served.values())
    assert way.groups == 1 and link.sent == pytest.approx(710 * GB, rel=0.01)  # not once per engine
    assert Counted.peak <= 2 * (2 << 30) + 8 * (1 << 20) * 100
    print(f"{count} tensors, {engines} engines: {seconds:.1f} s, {cpu:.1f} s of Python, {Counted.peak / GB:.2f} GB")
    limit = 710 * GB / link.rate
    assert limit < seconds < 1.1 * limit
