"""Faults at the exporter, on the wire and in engine memory, each with the detector that must catch it.

Two embedded engines draft for real; versions differ in every tensor, as after a training step. "Caught" means before
a sample would be trained on: by the push itself, by the stamps and log-probs that are checked with the samples, or by
the comparison after sleep.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from weight_oracles import echo_checkpoint, mimo_logits

from megatron_rlspec.engine import EngineError
from megatron_rlspec.models.names import name_table
from megatron_rlspec.push.bucket import Bucket
from megatron_rlspec.push.detectors import HealthSettings, stamp_finding
from megatron_rlspec.push.health import Health
from megatron_rlspec.push.push import Pusher, PushError
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

MTP = "model.mtp_layers.0."
FIXED = SpecConfig(3)
PROMPTS = [Prompt(i, np.random.default_rng(i).integers(0, 128, 6)) for i in range(8)]
SAMPLING = Sampling(max_new_tokens=24, ignore_eos=True)


def speculate(name, engine) -> None:
    engine.set_config(FIXED)


class Engine(EmbeddedEngine):
    """The embedded engine with places to inject faults."""

    def __init__(self, config, tensors):
        self.wire = lambda name, tensor: tensor
        super().__init__(config, tensors, max_length=64, max_total_tokens=2048)

    def send(self, bucket):
        super().send(Bucket([(n, self.wire(n, t)) for n, t in bucket.tensors]))


class Room:
    """Engines a and b, healthy at version 0, and a trainer that is about to push version 1.

    engines  those of `test_sglang_faults.py`; otherwise embedded ones
    """

    def __init__(self, engines=None):
        self.config, self.old = echo_checkpoint(0)
        self.new = echo_checkpoint(1)[1]
        self.engines = engines or {name: Engine(self.config, self.old.items()) for name in "ab"}
        self.damage = lambda name, tensor: tensor
        self.found: list[str] = []
        is_drafter = set(name_table(self.config).drafter_names).__contains__
        self.health = Health(
            Pusher(self.engines),
            is_drafter,
            speculate,
            PROMPTS,
            settings=HealthSettings(canary_tokens=24, canary_share=1.0),
        )
        first = self.health.push(0, lambda scope: self.old.items())
        assert not first.verdict.records and first.canaries["a"].accept_length > 2.0

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


def trainer_logprobs(config, tensors, tokens):
    ids = torch.as_tensor(tokens)[None]
    logits = mimo_logits(config, tensors, ids)[0][0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], logprobs.numpy()])


def differing(pusher, names=None):
    """Compare again, without a push, what engines hold. Returns a detector's name for each engine that differs."""
    engines = [pusher.engines[name] for name in names or pusher.engines]
    return ["fingerprint" for engine in engines if not pusher.compare_with(engine).empty]


def logprobs_differ(samples, recomputed, bound=1e-3):
    """Return ["logprobs"] if engine and trainer differ by more than `bound` nats a response token on average."""
    gaps = []
    for sample, values in zip(samples, recomputed, strict=True):
        response = slice(sample.prompt_len, len(sample.tokens))
        gaps.append(np.abs(sample.behaviour_logprobs[response] - values[response]))
    return [] if np.concatenate(gaps).mean() <= bound else ["logprobs"]


def swap(tensor, dim):
    first, second = tensor.chunk(2, dim=dim)
    return torch.cat((second, first), dim)


def at_exporter(change):
    """Make a fault: the exporter yields the tensors of `change(room)`, {name: tensor}, instead of the right ones."""

    def fault(room):
        wrong = change(room)
        room.damage = lambda name, tensor: wrong.get(name, tensor)
        room.push()
        room.rollout()

    return fault


def on_the_wire(change):
    """Make a fault: engine b receives other tensors."""

    def fault(room):
        room.engines["b"].wire = lambda name, tensor: change(room, name, tensor)
        room.push()

    return fault


def behind_the_back(change, scope="all"):
    """Make a fault inside engine b after a good push: its loader gets tensors without the pusher."""

    def fault(room):
        room.push()
        assert not room.found
        room.engines["b"].update_weights(1, change(room).items(), scope)
        room.found += differing(room.health.pusher)

    return fault


def old_version(room):
    with pytest.MonkeyPatch.context() as skipped:
        for step in ("begin_update", "send", "end_update"):
            skipped.setattr(room.engines["b"], step, lambda *_: None)
        room.push()
    room.found += differing(room.health.pusher, ["b"])


def restarted(room):
    room.push()
    room.engines["b"].update_weights(0, room.old.items())  # without the pusher, as a supervisor might do
    room.rollout()


def killed_half_way(room):
    def dies(name, tensor):
        if name == "model.norm.weight":
            raise EngineError("engine b: the connection was lost")
        return tensor

    room.engines["b"].wire = dies
    room.push()


def not_a_number(room):
    room.damage = lambda name, tensor: tensor * float("nan") if name == "model.norm.weight" else tensor
    with pytest.raises(PushError, match="model.norm.weight holds NaN"):
        room.push()
    room.found.append("refused")
    with pytest.raises(EngineError):
        room.rollout()


def with_nan(room):
    tensor = room.new["model.norm.weight"].clone()
    tensor[3] = float("nan")
    return {**room.new, "model.norm.weight": tensor}


# Name as in the table of docs/weights.md -> injection, and the detector that must fire.
FAULTS = {
    "exporter: input projection's halves exchanged": (
        at_exporter(lambda r: {MTP + "input_proj.weight": swap(r.new[MTP + "input_proj.weight"], 1)}),
        "canary",
    ),
    "exporter: drafter's down_proj scaled by 10": (
        at_exporter(lambda r: {MTP + "mlp.down_proj.weight": r.new[MTP + "mlp.down_proj.weight"] * 10}),
        "canary",
    ),
    "exporter: drafter's o_proj transposed": (
        at_exporter(lambda r: {MTP + "self_attn.o_proj.weight": r.new[MTP + "self_attn.o_proj.weight"].T.contiguous()}),
        "canary",
    ),
    "exporter: target's down_proj shards exchanged": (
        at_exporter(lambda r: {(n := "model.layers.0.mlp.down_proj.weight"): swap(r.new[n], 1)}),
        "logprobs",
    ),
    "exporter: head of another step": (at_exporter(lambda r: {"lm_head.weight": r.old["lm_head.weight"]}), "logprobs"),
    "exporter: a drafter of the same shapes from another model": (
        at_exporter(
            lambda r: {
                n: t[torch.randperm(len(t), generator=torch.Generator().manual_seed(9))]
                for n, t in r.new.items()
                if n.startswith(MTP)
            }
        ),
        "canary",
    ),
    "exporter: NaN in one tensor": (not_a_number, "refused"),
    "wire: one bit of one tensor": (
        on_the_wire(lambda r, n, t: t + (torch.arange(t.numel()).view_as(t) == 5) * 1e-6 if "up_proj" in n else t),
        "fingerprint",
    ),
    "wire: one tensor stale": (
        on_the_wire(lambda r, n, t: r.old[n] if n == "model.norm.weight" else t),
        "fingerprint",
    ),
    "wire: the drafter is skipped": (
        on_the_wire(lambda r, n, t: r.old[n] if n.startswith(MTP) else t),
        "fingerprint",
    ),
    "wire: rounded to bfloat16": (on_the_wire(lambda r, n, t: t.bfloat16().to(t.dtype)), "fingerprint"),
    "wire: killed half-way": (killed_half_way, "session"),
    "engine: old version on one of two": (old_version, "fingerprint"),
    "engine: restarted with old weights": (restarted, "stamp"),
    "engine: drafter zeroed": (
        behind_the_back(lambda r: {n: torch.zeros_like(t) for n, t in r.new.items() if n.startswith(MTP)}, "drafter"),
        "fingerprint",
    ),
    "engine: NaN in one tensor": (behind_the_back(with_nan), "fingerprint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    inject, detector = FAULTS[name]
    room = Room()
    inject(room)
    assert detector == room.found[0]


def test_without_a_fault_no_detector_fires():
    room = Room()
    report = room.push()
    for engine in room.engines:
        for _ in range(4):
            room.rollout(engine)
    assert room.found == [] and report.serving == ("a", "b") and not report.verdict.engines("plain")


def test_a_drafter_that_stays_wrong_decodes_plainly_with_the_right_text():
    """The exporter's bug survives the second push; the target is sound, so the engine continues without speculation."""
    room = Room()
    name = MTP + "input_proj.weight"
    room.damage = lambda n, t: swap(t, 1) if n == name else t
    report = room.push()
    assert report.verdict.engines("plain") == ("a", "b") and report.serving == ("a", "b")
    assert all(engine.choice.present == OFF for engine in room.engines.values())
    room.found.clear()
    room.rollout()
    assert room.found == []


def test_a_request_waits_for_the_end_of_an_update():
    config, tensors = echo_checkpoint(0)
    engine = Engine(config, tensors.items())
    engine.begin_update(1)
    with ThreadPoolExecutor(1) as thread:
        drawn = thread.submit(engine.generate, [Request("r", PROMPTS[0], seed=0)], SAMPLING)
        while not engine.scheduler.every:
            time.sleep(0.001)
        engine.send(Bucket(list(echo_checkpoint(1)[1].items())))
        assert not drawn.done()
        engine.end_update()
        [sample] = drawn.result()
    assert [version for version, *_ in sample.policy_versions] == [1]


@pytest.mark.slow
def test_no_false_alarm_in_two_hundred_healthy_pushes():
    """Weights change as in training; fingerprints, canary and stamps raise no alarm."""
    room = Room()
    for version in range(1, 201):
        room.new = echo_checkpoint(version % 40)[1]
        report = room.health.push(version, lambda scope: room.new.items())
        assert not report.verdict.records, (version, report.verdict.records)
