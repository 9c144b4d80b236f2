"""Detectors and decisions of the health contract, and the sequence of repair on engines with documented behaviour."""

import numpy as np
import pytest
import torch
from memory_engine import MemoryEngine

from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.detectors import HealthSettings, canary_finding, stamp_finding
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.push.health import Health
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.types import Prompt, Sample, SpecConfig

FIXED = SpecConfig(5)
PROMPTS = [Prompt(i, np.arange(4 + i)) for i in range(8)]


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    names = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.mtp_layers.0.input_proj.weight"]
    return {name: torch.randn(4, 8, generator=generator) for name in names}


def is_drafter(name: str) -> bool:
    return "mtp" in name


def exporter(version: int, damage=lambda name, tensor: tensor):
    return lambda scope: ((name, damage(name, tensor)) for name, tensor in weights(version).items())


def speculate(name, engine) -> None:
    engine.set_config(FIXED)


def healthy(engines, **settings) -> Health:
    return Health(
        Pusher(engines), is_drafter, speculate, PROMPTS, settings=HealthSettings(**{"canary_share": 1.0} | settings)
    )


def good_for(engines, version: int) -> None:
    """Make the memory engines draft well with the drafter of this version only."""
    for engine in engines.values():
        engine.good_drafter = {n: fingerprint(t) for n, t in weights(version).items() if is_drafter(n)}


def push(health: Health, version: int, **options):
    good_for(health.pusher.engines, version)
    return health.push(version, options.pop("source", exporter(version)), **options)


# ---- detectors --------------------------------------------------------------------------------------------------


def sample(spans, response: int = 4) -> Sample:
    n = 3 + response
    return Sample(
        "s", Prompt(0, np.arange(3)), np.arange(n), np.ones(n), np.full(n, -1.0), policy_versions=tuple(spans)
    )


def test_stamps():
    assert stamp_finding([sample([(7, 3, 5), (8, 5, 7)])], 7, 8) is None
    old = stamp_finding([sample([(7, 3, 7)]), sample([(6, 3, 7)])], 7, 7)
    assert old.message == "s: tokens 3 to 7 drawn by version 6, expected 7" and old.target
    assert "versions cover 2 of 4" in stamp_finding([sample([(7, 3, 5)])], 7, 7).message
    assert "version 9, expected 7 to 8" in stamp_finding([sample([(9, 3, 7)])], 7, 8).message


def test_canary_floor():
    good = (60, 40, 30, 70)
    weak = (150, 30, 10, 2)
    dead = (200, 0, 0, 0)
    assert canary_finding(good, 2.6) is None
    assert "accept length 1.29 over 192 rounds, expected at least 1.80" in canary_finding(weak, 2.6).message
    assert "accept length 1.00" in (message := canary_finding(dead, 2.6).message)
    assert "no draft is accepted, as when an EAGLE-3 drafter reads other layers" in message
    assert "EAGLE-3" not in canary_finding(weak, 2.6).message
    assert canary_finding(weak, 1.3) is None  # a weak drafter that was predicted to be weak
    assert canary_finding(dead, None) is None and canary_finding(dead, 1.0) is None
    assert canary_finding((3, 0), 2.6) is None  # three rounds prove nothing
    assert "no round" in canary_finding((), None).message


# ---- repair -----------------------------------------------------------------------------------------------------


def test_a_lost_tensor_is_pushed_again_and_recorded_once():
    engines = {"a": MemoryEngine("a"), "b": MemoryEngine("b")}
    health = healthy(engines)
    lost = iter([True])
    engines["b"].wire = lambda n, t: None if is_drafter(n) and next(lost, False) else (n, t)
    report = push(health, 0)
    assert report.serving == ("a", "b") and not report.verdict.engines("plain")
    (record,) = report.verdict.records
    assert record["engine"] == "b" and record["action"] == "speculate" and record["after_second_push"] == []
    assert record["found"] == ["fingerprint: lacks model.mtp_layers.0.input_proj.weight"]
    assert [len(e.sessions) for e in engines.values()] == [1, 2]
    # Speculation was off in between, and b ends with the configuration that was asked for.
    assert engines["b"].configs[0] == "off" and engines["b"].config == FIXED


def test_canaries_stay_within_their_share_of_the_time(monkeypatch):
    """Pushes 1 s apart, canaries of 0.3 s: with a ninth of the time about every third push has one."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    engines = {"a": MemoryEngine()}
    generate = engines["a"].generate

    def slowly(requests, sampling):
        clock[0] += 0.3
        return generate(requests, sampling)

    engines["a"].generate = slowly
    health = healthy(engines, canary_first=1, canary_share=0.11)
    sang = []
    for version in range(12):
        sang.append("health/canary_accept_length" in push(health, version).metrics())
        clock[0] += 1.0 - 0.3 * sang[-1]
    assert sang[:4] == [True, False, False, True] and 0.3 * sum(sang) <= 0.11 * 12 + 0.3
    for version in range(12, 18):
        clock[0] += 1.0
        report = push(health, version, source=exporter(version, lambda name, t: t * 2 if is_drafter(name) else t))
        if report.verdict.engines("plain"):
            break
    assert report.verdict.engines("plain") == ("a",)
    report = push(health, version + 1)  # without a pause, but with a canary, since the engine had a finding
    assert "health/canary_accept_length" in report.metrics() and not report.verdict.engines("plain")


def test_an_engine_whose_target_stays_wrong_leaves_the_rotation():
    engines = {"a": MemoryEngine("a"), "b": MemoryEngine("b")}
    health = healthy(engines)
    engines["b"].wire = lambda n, t: (n, torch.zeros_like(t) if n == "lm_head.weight" else t)
    report = push(health, 0)
    assert report.serving == ("a",) and report.verdict.records[0]["action"] == "drop"
    engines["a"].fail_at = 0
    with pytest.raises(HealthError, match="no engine is left to serve: a: session: a: connection lost"):
        push(health, 1)


def test_a_run_without_speculation_checks_stamps_only():
    engines = {"a": MemoryEngine(acceptance=0.0)}
    health = Health(Pusher(engines), is_drafter, None, PROMPTS, settings=HealthSettings(canary_share=1.0))
    assert not health.push(0, exporter(0), predicted=3.0).verdict.records and engines["a"].configs == []
    engines["a"].after_update = lambda engine: setattr(engine, "version", 0)
    with pytest.raises(HealthError, match="no engine is left to serve: a: stamp"):
        health.push(1, exporter(1))


def test_a_joining_engine_runs_the_canary_and_gets_the_runs_rule():
    engines = {"a": MemoryEngine()}
    health = healthy(engines, canary_first=1, canary_share=1e-9)
    push(health, 0)
    assert not push(health, 1).canaries, "no canary is due"
    assert push(health, 1, suspicious=True).canaries
    engines["b"] = MemoryEngine()
    health.join("b")
    report = push(health, 2)
    assert report.canaries.keys() == {"a", "b"} and report.serving == ("a", "b")
    assert health.pusher.engines["b"].configs[-1] == "k5"
    assert not push(health, 3).canaries
