"""Faults against two real SGLang processes on the CPU, healthy pushes without alarm, and a pusher killed at random.

The engines load a checkpoint that went through Megatron's format and back.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_faults import FAULTS, PROMPTS, SAMPLING, Room
from weight_oracles import echo_checkpoint

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.engine import EngineError
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.push import update
from megatron_rlspec.push.bucket import Bucket
from megatron_rlspec.push.fingerprint import compare, fingerprint
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.client.transport import Http
from megatron_rlspec.types import Request

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("RLSPEC_KILLS", "20"))  # of pushers
SERVE = ["--device", "cpu", "--dtype", "float32", "--candidate-steps", "0,1,2,3", "--max-total-tokens", "8192"]


def start(room: Path, name: str) -> EngineProcess:
    return launch(room / "served", room / f"{name}.log", arguments=SERVE)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    room = tmp_path_factory.mktemp("sglang")
    config, tensors = echo_checkpoint(0)
    write_hf(room / "hf", config, tensors)
    convert(plan(room / "hf", room / "megatron"))
    convert(plan(room / "megatron", room / "served"))
    return room


@pytest.fixture(scope="module")
def urls(served) -> Iterator[list[str]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RLSPEC_API_KEY", "right-key")  # of engines, and of clients that know an address only
        processes = [start(served, name) for name in "ab"]
        try:
            yield [process.wait().url for process in processes]
        finally:
            for process in processes:
                process.close()


class Engine(SGLangEngine):
    """The client with a place to damage what it sends. It takes single tensors, and packs them itself."""

    bucket_memory = None

    def __init__(self, url):
        super().__init__(url, timeout=60, transport=Http())
        self.wire = lambda name, tensor: tensor

    def send(self, bucket):
        damaged = [(name, self.wire(name, tensor)) for name, tensor in bucket.tensors]
        super().send(Bucket(damaged, self._transport.memory))


def room_of(urls) -> Room:
    return Room({name: Engine(url) for name, url in zip("ab", urls, strict=True)})


ONLY_EMBEDDED = ("wire: one bit of one tensor", "wire: rounded to bfloat16")


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ONLY_EMBEDDED])
def test_fault_is_caught(urls, name):
    inject, detector = FAULTS[name]
    room = room_of(urls)
    inject(room)
    assert detector == room.found[0]
    if detector in ("refused", "session"):
        with pytest.raises(EngineError, match="serves nothing since a failed weight update"):
            room.rollout()


def test_twenty_healthy_pushes_raise_no_alarm(urls):
    room = room_of(urls)
    for version in range(1, 21):
        room.new = echo_checkpoint(version)[1]
        report = room.push(version)
        room.rollout("ab"[version % 2], version)
        assert room.found == [] and report.serving == ("a", "b") and not report.verdict.engines("plain")


def pusher_process(url, version, tensors, slowly):
    def source(scope):
        for name, tensor in tensors.items():
            time.sleep(slowly)
            yield name, tensor

    update.bucket_bytes = lambda memory: 1  # tensors travel alone, so that a mixture is there between two of them
    Pusher({"a": SGLangEngine(url, timeout=60, transport=Http())}).push(version, source)
    os._exit(0)


def test_a_pusher_killed_at_random_moments_leaves_nothing_mixed(urls):
    """Afterwards an engine answers with one version. An engine that holds a mixture serves nothing until a push."""
    room = room_of(urls)
    chance = random.Random(0)
    marks = [{n: fingerprint(t) for n, t in echo_checkpoint(v)[1].items()} for v in (0, 1)]
    context = multiprocessing.get_context("fork")
    outcomes = {"old": 0, "new": 0, "silent": 0, "mixed": 0}
    for trial in range(KILLS):
        process = context.Process(target=pusher_process, args=(urls[0], 1, room.new, 0.02))
        process.start()
        time.sleep(chance.uniform(0.0, 2.0))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        time.sleep(0.3)  # what it had sent arrives
        fresh = SGLangEngine(urls[0], timeout=5.0)
        answered = True
        try:
            sample = fresh.generate([Request(f"probe-{trial:02d}.", PROMPTS[0], seed=trial)], SAMPLING)[0]
        except EngineError:
            answered = False
        held = fresh.fingerprints()
        whole = [version for version in (0, 1) if compare(marks[version], held).empty]
        if not answered:
            outcomes["silent" if whole else "mixed"] += 1
        else:
            assert whole, f"trial {trial}: the engine serves a mixture"
            assert {span[0] for span in sample.policy_versions} == set(whole)
            outcomes["new" if whole == [1] else "old"] += 1
        report = room.health.push(0, lambda scope: room.old.items())  # and it comes back
        assert not report.verdict.records, report.verdict.records
    assert outcomes["mixed"] > 0, f"no trial met an engine in between: {outcomes}"
    print(f"\n{KILLS} pushers killed: {outcomes}")


def test_an_engine_killed_during_a_push_leaves_the_rotation_and_comes_back(urls, served):
    room = room_of(urls)
    victim = start(served, "victim")
    room.engines["c"] = Engine(victim.wait().url)

    def dies(name, tensor):
        if name == "model.norm.weight":
            os.killpg(victim.process.pid, signal.SIGKILL)
        return tensor

    room.engines["c"].wire = dies
    report = room.push()
    assert report.serving == ("a", "b") and report.verdict.records[0]["engine"] == "c" and "session" in room.found
    room.rollout("a")
    again = start(served, "again")
    try:
        room.engines["c"] = Engine(again.wait().url)
        assert room.push(2).serving == ("a", "b", "c")
    finally:
        victim.close()
        again.close()
