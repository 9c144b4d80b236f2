"""Faults against two real SGLang processes on the CPU, healthy pushes without alarm, and a pusher killed at random.

The engines load a checkpoint that went through Megatron's format and back. To damage their memory, tests call SGLang's
own loader without the pusher.
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
import test_faults
import torch
from test_faults import MTP, PROMPTS, SAMPLING, differing, logprobs_differ, speculate, trainer_logprobs
from weight_oracles import echo_checkpoint

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.engine import EngineError
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.models.names import name_table
from megatron_rlspec.push import update
from megatron_rlspec.push.bucket import Bucket
from megatron_rlspec.push.detectors import HealthSettings, stamp_finding
from megatron_rlspec.push.fingerprint import compare, fingerprint
from megatron_rlspec.push.health import Health
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


class Room:
    """Both engines, healthy at version 0, and a trainer that is about to push version 1."""

    def __init__(self, urls):
        self.config, self.old = echo_checkpoint(0)
        self.new = echo_checkpoint(1)[1]
        self.engines = dict(zip("ab", map(Engine, urls), strict=True))
        is_drafter = set(name_table(self.config).drafter_names).__contains__
        self.health = Health(
            Pusher(self.engines),
            is_drafter,
            speculate,
            PROMPTS,
            settings=HealthSettings(canary_tokens=24, canary_share=1.0),
        )
        report = self.health.push(0, lambda scope: self.old.items())
        assert not report.verdict.records and report.canaries["a"].accept_length > 2.0
        self.found: list[str] = []
        self.damage = lambda name, tensor: tensor

    def push(self, version=1):
        report = self.health.push(version, lambda scope: ((n, self.damage(n, t)) for n, t in self.new.items()))
        self.found += [line.split(":")[0] for record in report.verdict.records for line in record["found"]]
        return report

    def rollout(self, engine="b", version=1):
        requests = [Request(f"r{time.monotonic_ns()}-{i:03d}.", prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
        samples = self.engines[engine].generate(requests, SAMPLING)
        recomputed = [trainer_logprobs(self.config, self.new, sample.tokens) for sample in samples]
        self.found += ["stamp"] if stamp_finding(samples, version, version) else []
        self.found += logprobs_differ(samples, recomputed)

    def look(self):
        self.found += differing(self.health.pusher)

    def behind_the_back(self, tensors, version=1, scope="all"):
        self.engines["b"].update_weights(version, tensors, scope)


def old_version(room):
    engine = room.engines["b"]
    with pytest.MonkeyPatch.context() as skipped:
        for step in ("begin_update", "send", "end_update"):
            skipped.setattr(engine, step, lambda *_: None)
        room.push()


def drafter_zeroed(room):
    room.push()
    zeros = {n: torch.zeros_like(t) for n, t in room.new.items() if n.startswith(MTP)}
    room.behind_the_back(zeros.items(), scope="drafter")
    room.look()


def nan_in_memory(room):
    room.push()
    tensor = room.new["model.norm.weight"].clone()
    tensor[3] = float("nan")
    room.behind_the_back({**room.new, "model.norm.weight": tensor}.items())
    room.look()


def restarted_with_old_weights(room):
    room.push()
    room.behind_the_back(room.old.items(), version=0)
    room.rollout()


FAULTS = {
    **{name: fault for name, fault in test_faults.FAULTS.items() if name.startswith("exporter: ")},
    **{f"wire: {name}": test_faults.FAULTS[f"wire: {name}"] for name in ("one tensor stale", "the drafter is skipped")},
    "wire: killed half-way": test_faults.FAULTS["wire: killed half-way"],
    "engine: old version on one of two": (old_version, "fingerprint"),
    "engine: restarted with old weights": (restarted_with_old_weights, "stamp"),
    "engine: drafter zeroed": (drafter_zeroed, "fingerprint"),
    "engine: NaN in one tensor": (nan_in_memory, "fingerprint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(urls, name):
    inject, detector = FAULTS[name]
    room = Room(urls)
    inject(room)
    assert detector == room.found[0]
    if detector in ("refused", "session"):
        with pytest.raises(EngineError, match="serves nothing since a failed weight update"):
            room.rollout()


def test_twenty_healthy_pushes_raise_no_alarm(urls):
    room = Room(urls)
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
    room = Room(urls)
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
    room = Room(urls)
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


def test_engine_logprobs_equal_those_of_the_trainers_model(urls):
    """SGLang's log-probs equal Transformers', from a checkpoint that went through Megatron's format."""
    room = Room(urls)
    room.new = room.old
    room.rollout("a", version=0)
    assert room.found == []
