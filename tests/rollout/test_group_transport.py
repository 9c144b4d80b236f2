"""The process group of a push, over gloo, between real processes: who gets which message, in which order.

Two engines, one of one rank and one of two, are processes without SGLang that keep a log, and receive as its scheduler
does. Between GPUs it is NCCL, and a rank that waits for another order than its peers waits for ever
there. So the order is what this file shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace

import forked
import pytest
import torch
import torch.distributed as dist

from megatron_rlspec.push.bucket import Bucket, sizes_of
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast

SIZES = {"first": 1, "second": 2}  # ranks of each engine


def member(pipe: Connection, place: int) -> None:
    """Be one rank of an engine, the `place`-th of it: do as told, until told nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups: dict[str, dist.ProcessGroup] = {}
    loaded: list[dict] = []
    while (told := pipe.recv()) is not None:
        path, body = told
        loaded.clear()
        if path == "weights/join":
            groups[body["group"]] = join(body, body["first"] + place)
        elif path == "weights/receive":
            landed = torch.empty(sum(sizes_of(body["dtypes"], body["shapes"])), dtype=torch.uint8)
            group = groups[body["group"]]
            dist.broadcast(landed, src=0, group=group)
            loaded.append({"bytes": landed.tolist(), "rank": group.rank()})
        pipe.send({"loaded": list(loaded)})


def join(body: dict, rank: int) -> dist.ProcessGroup:
    """Join as SGLang's `init_custom_process_group` does."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    wait = timedelta(seconds=60)
    store = dist.TCPStore(body["address"], body["port"], body["size"], is_master=False, timeout=wait)
    shared = dist.PrefixStore(body["group"], store)
    backend = dist.Backend(body["backend"])
    group, _ = _new_process_group_helper(
        body["size"], rank, [], backend, shared, group_name=body["group"], timeout=wait
    )
    _world.pg_group_ranks[group] = {i: i for i in range(body["size"])}
    return group


class Engine:
    """What `GroupBroadcast` sees of an engine: the function that posts to it."""

    def __init__(self, name: str, log: list[tuple[str, str, object]]) -> None:
        self.name = name
        self.log = log
        self.received: list[dict] = []
        self.ranks = []
        for place in range(SIZES[name]):
            ours, theirs = forked.context().Pipe()
            process = forked.context().Process(target=member, args=(theirs, place), daemon=True)
            process.start()
            self.ranks.append(SimpleNamespace(pipe=ours, process=process))

    def post(self, path: str, json: dict | None = None) -> dict:
        if path == "control/describe":
            return {"tensor_parallel": SIZES[self.name]}
        what = json or {}
        self.log.append((self.name, path, what.get("names") or what.get("first")))
        for rank in self.ranks:
            rank.pipe.send((path, json))
        answers = [rank.pipe.recv() for rank in self.ranks]
        self.log.append((self.name, "answered", path))
        self.received += [loaded for answer in answers for loaded in answer["loaded"]]
        return answers[0]

    def close(self) -> None:
        for rank in self.ranks:
            rank.pipe.send(None)
            rank.process.join(60)
            rank.process.kill()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    log: list[tuple[str, str, object]] = []
    made = [Engine(name, log) for name in SIZES]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield made
    for engine in made:
        engine.close()
    dist.destroy_process_group()


def push(transport: GroupBroadcast, engines: list[Engine], buckets: list[dict[str, torch.Tensor]]) -> None:
    """Send each bucket to all engines, as `Pusher` does."""
    for tensors in buckets:
        posts = [engine.post for engine in engines]
        transport.send(posts, Bucket(list(tensors.items()), transport.memory))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{seed}.{name}": torch.rand(3, 5 + seed, generator=generator) for name in ("a", "b")}


def test_every_rank_joins_once_and_gets_every_bucket_in_its_order(engines: list[Engine]) -> None:
    transport = GroupBroadcast()
    assert transport.backend == "gloo"
    sent = [tensors(seed) for seed in range(3)]
    push(transport, engines, sent)
    log = engines[0].log
    joined = [entry for entry in log if entry[1] == "weights/join"]
    assert len(joined) == 2 and {first for *_, first in joined} == {1, 1 + SIZES[joined[0][0]]}
    # A bucket is announced to both engines, and both answer, before the next one is announced.
    rest = log[4:]
    for number, bucket in enumerate(sent):
        four = rest[4 * number : 4 * number + 4]
        told = [(name, names) for name, path, names in four if path == "weights/receive"]
        assert sorted(told) == [("first", list(bucket)), ("second", list(bucket))]
        assert {name for name, path, _ in four if path == "answered"} == set(SIZES)
    assert len(rest) == 12
    for engine in engines:
        for i in range(len(engine.ranks)):
            got = engine.received[i :: len(engine.ranks)]
            assert len(got) == 3
            for bucket, answer in zip(sent, got, strict=True):
                expected = torch.cat([tensor.flatten() for tensor in bucket.values()])
                landed = torch.tensor(answer["bytes"], dtype=torch.uint8).view(torch.float32)
                assert torch.equal(landed[: len(expected)], expected)
    ranks = [answer["rank"] for engine in engines for answer in engine.received[: len(engine.ranks)]]
    assert sorted(ranks) == [1, 2, 3]


def test_another_set_of_engines_makes_another_group(engines: list[Engine]) -> None:
    transport = GroupBroadcast()
    push(transport, engines, [tensors(0)])
    push(transport, engines[:1], [tensors(1), tensors(2)])
    push(transport, engines, [tensors(3)])
    joins = [name for name, path, _ in engines[0].log if path == "weights/join"]
    assert sorted(joins[:2]) == sorted(joins[3:]) == ["first", "second"] and joins[2] == "first"
    assert [len(engine.received) for engine in engines] == [4, 4]
