"""SGLang's real engine on the CPU, with a tiny random MiMo: two servers, started once, and a third for slow tests.

`adaptive` speculates under a schedule that tests replace, `plain` was launched without speculation, and `unkeyed`
speculates with correct sampling that is not position-keyed: the sampler that the identity test must detect.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pieces
import pytest
import tiny_mimo
import torch
from taking_turns import generate_in_turns

from megatron_rlspec.engine import EngineError
from megatron_rlspec.integrations.slime.engines import after_push
from megatron_rlspec.integrations.slime.speculation import SlimeDraftRule
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine, _body
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.speculation.acceptance import pooled
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Partial, Prompt, Request, Sample, Sampling, SpecConfig

CONFIG = tiny_mimo.config(hidden=64, layers=8, heads=4, kv_heads=2, ffn=128, vocab=160)
WEIGHTS = tiny_mimo.weights(CONFIG)
LAUNCHES = {
    "adaptive": ["--spec", "adaptive", "--candidate-steps", "0,1,2,3", "--ragged"],
    "plain": ["--spec", "off"],
    "unkeyed": ["--spec", "fixed", "--num-steps", "3", "--verifier", "target_only"],
}
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tiny_mimo.write(tmp_path_factory.mktemp("tiny") / "mimo", CONFIG, WEIGHTS)
    pieces.write(written, CONFIG["vocab_size"])
    return written


class Engines(dict[str, SGLangEngine]):
    """The engines by name. `unkeyed` starts when a test asks for it."""

    def __init__(self, checkpoint: Path, logs: Path) -> None:
        self.checkpoint = checkpoint
        self.logs = logs
        self.processes: dict[str, EngineProcess] = {}

    def start(self, name: str) -> None:
        log = self.logs / f"{name}.log"
        self.processes[name] = launch(self.checkpoint, log, arguments=[*SERVE, *LAUNCHES[name]])

    def __missing__(self, name: str) -> SGLangEngine:
        if name not in self.processes:
            self.start(name)
        self[name] = SGLangEngine.of(self.processes[name].wait(), timeout=120)
        return self[name]


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RLSPEC_API_KEY", "right-key")  # of all engines, and of clients that know an address only
        started = Engines(checkpoint, tmp_path_factory.mktemp("logs"))
        try:
            for name in ("adaptive", "plain"):  # side by side
                started.start(name)
            assert started["adaptive"] and started["plain"]
            yield started
        finally:
            for process in started.processes.values():
                process.close()


def requests(n: int, tag: str = "r") -> list[Request]:
    lengths = np.random.default_rng(0).integers(1, 40, n)
    prompts = [Prompt(i, np.random.default_rng(i).integers(3, 160, lengths[i])) for i in range(n)]
    return [Request(f"{tag}-{i:03d}.", prompt, seed=1000 + i) for i, prompt in enumerate(prompts)]


def texts(samples: list[Sample]) -> list[list[int]]:
    return [s.response.tolist() for s in samples]


def k(num_steps: int) -> SpecConfig:
    return SpecConfig(num_steps)


SWITCHING = (SpecConfig(1), OFF, SpecConfig(2), SpecConfig(3), OFF, SpecConfig(0))

SAMPLINGS = {
    "T=1": Sampling(temperature=1.0, max_new_tokens=48),
    "greedy": Sampling(temperature=0.0, max_new_tokens=32, ignore_eos=True),
    "filtered": Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=32, ignore_eos=True),
}


@pytest.mark.lossless
@pytest.mark.parametrize("name", SAMPLINGS)
def test_text_does_not_depend_on_speculation(engines: dict[str, SGLangEngine], name: str) -> None:
    asked = requests(16)
    sampling = SAMPLINGS[name]
    plain = engines["plain"].generate(asked, sampling)
    assert len({tuple(t) for t in texts(plain)}) > 10
    for configs in ((k(3),), SWITCHING) if name == "T=1" else (SWITCHING,):
        generate = partial(engines["adaptive"].generate, asked, sampling)
        for speculated in generate_in_turns(engines["adaptive"], configs, generate):
            assert texts(speculated) == texts(plain)
            for a, b in zip(speculated, plain, strict=True):
                np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=2e-4)
                assert a.status == b.status


# Drafts that are worth it by the costs: none, some, and all. A request in 64 verifies all its drafts in any case.
WORTH_IT = {
    "none": Roofline(0.01, token_ms=10.0, context_ms=0.0, drafter=0.0),
    "some": Roofline(1.0, token_ms=1 / 32, context_ms=0.0, drafter=0.02),
    "all": Roofline(1.0, token_ms=0.0, context_ms=0.0, drafter=0.02),
}


def choosing(cost: Roofline) -> dict[str, Any]:
    """Return a rule that verifies the drafts worth it by these costs."""
    return {"candidates": [3], "roofline": cost.to_json(), "ragged": True}


@pytest.mark.lossless
@pytest.mark.parametrize("name", SAMPLINGS)
def test_text_does_not_depend_on_which_drafts_are_verified(engines: dict[str, SGLangEngine], name: str) -> None:
    engine = engines["adaptive"]
    asked = requests(16)
    sampling = SAMPLINGS[name]
    verified = {}
    try:
        engine.update_weights(1, half_wrong_drafter().items())
        engine.set_config(OFF)
        plain = engine.generate(asked, sampling)
        for worth, cost in WORTH_IT.items():
            engine.set_spec_rule(choosing(cost))
            for _ in range(2):  # while all drafts are verified at first, and by what was learnt
                engine.stats()
                speculated = engine.generate(asked, sampling)
                assert texts(speculated) == texts(plain), worth
                for a, b in zip(speculated, plain, strict=True):
                    np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=2e-4)
            rounds = engine.stats()
            accepted = pooled(stats.accepted for stats in rounds)
            verified[worth] = sum(stats.verified for stats in rounds) / accepted.sum()
            assert accepted @ np.arange(len(accepted)) <= sum(stats.verified for stats in rounds)
    finally:
        engine.set_config(k(3))
        engine.update_weights(0, WEIGHTS.items())
    print(f"verified drafts of a request and round: {verified}")
    assert verified["none"] + 0.05 < verified["some"] < 2.7 < verified["all"] == 3


@pytest.mark.slow
@pytest.mark.lossless
def test_the_identity_test_detects_a_sampler_that_is_not_keyed(engines: dict[str, SGLangEngine]) -> None:
    asked = requests(16)
    plain = engines["plain"].generate(asked, SAMPLINGS["T=1"])
    wrong = engines["unkeyed"].generate(asked, SAMPLINGS["T=1"])
    assert sum(a != b for a, b in zip(texts(plain), texts(wrong), strict=True)) > 10
    greedy = SAMPLINGS["greedy"]
    assert texts(engines["unkeyed"].generate(asked, greedy)) == texts(engines["plain"].generate(asked, greedy))


def test_logprobs_are_those_of_an_independent_model(engines: dict[str, SGLangEngine], checkpoint: Path) -> None:
    from transformers import Qwen2ForCausalLM

    oracle = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    engines["adaptive"].set_config(k(3))
    for temperature in (1.0, 0.7):
        sampling = Sampling(temperature=temperature, max_new_tokens=24, ignore_eos=True)
        for sample in engines["adaptive"].generate(requests(4), sampling):
            with torch.no_grad():
                logits = oracle(torch.from_numpy(sample.tokens)[None]).logits[0, :-1]
            logprobs = torch.log_softmax(logits / temperature, -1).gather(1, torch.from_numpy(sample.tokens[1:, None]))
            start = sample.prompt_len
            np.testing.assert_allclose(sample.behaviour_logprobs[start:], logprobs[start - 1 :, 0], atol=5e-4)
            assert not sample.behaviour_logprobs[:start].any() and sample.loss_mask.sum() == 24


def half_wrong_drafter() -> dict[str, torch.Tensor]:
    """Make an agreeing drafter half wrong, by its hidden states and by its attention."""
    drafter = tiny_mimo.agreeing(WEIGHTS, CONFIG["vocab_size"])
    layer = "model.mtp_layers.0."
    drafter[f"{layer}input_proj.weight"][:, :64] = WEIGHTS[f"{layer}input_proj.weight"][:, :64]
    drafter[f"{layer}self_attn.o_proj.weight"] = 5 * WEIGHTS[f"{layer}self_attn.o_proj.weight"]
    return drafter


def test_drafting_after_off_equals_drafting_after_step_0(engines: dict[str, SGLangEngine]) -> None:
    """After rounds without speculation, drafts equal those after rounds of step 0, which feed the drafter.

    Rounds that start at the same token must accept the same drafts. The drafter attends to its cache, and while off the
    first 64 rounds move to host memory.
    """
    engine = engines["adaptive"]
    prompts = [np.arange(10, 14), np.arange(20, 60), np.arange(5, 12)]
    asked = [Request(f"off-{i}.", Prompt(i, tokens), seed=i) for i, tokens in enumerate(prompts)]
    sampling = Sampling(temperature=0.3, max_new_tokens=300, ignore_eos=True)
    found = {}
    try:
        engine.update_weights(1, half_wrong_drafter().items())
        for resting in (SpecConfig(0), OFF):
            engine.set_config(resting)
            engine.stats()
            end = started(engine, asked, sampling, least=75)
            engine.set_config(SpecConfig(3))
            found[resting] = [rounds_of(sample) for sample in end()]
            assert {s.config for s in engine.stats()} == {resting, SpecConfig(3)}
    finally:
        engine.update_weights(0, WEIGHTS.items())
    both = []
    for read, caught_up in zip(found[SpecConfig(0)], found[OFF], strict=True):
        both += [(read[start], caught_up[start]) for start in set(read) & set(caught_up)]
    assert all(a == b for a, b in both), [pair for pair in both if pair[0] != pair[1]]
    assert len(both) > 50 and 10 < sum(a > 0 for a, _ in both) < len(both)


def rounds_of(sample: Sample) -> dict[int, int]:
    """Map the position in the response at which a round starts to its accepted drafts, for the last 80 tokens."""
    drafted = np.zeros(len(sample.response), bool)
    found = {}
    start = 1
    for a, b in sample.accepted_spans:
        drafted[a:b] = True
    for place in np.flatnonzero(~drafted).tolist():
        if start >= len(drafted) - 80:
            found[start] = place - start
        start = place + 1
    return found


ENDS = {
    "limit": Sampling(temperature=0.5, max_new_tokens=20, ignore_eos=True),
    "stop": Sampling(temperature=0.5, max_new_tokens=40, stop_token_ids=tuple(range(3, 160, 12))),
}


@pytest.mark.parametrize("name", ENDS)
def test_both_engines_run_and_count_the_same_rounds(engines: dict[str, SGLangEngine], name: str) -> None:
    """A round that begins at the same token accepts the same drafts. All rounds deliver what the first pass did not.

    SGLang's first pass delivers one token. The embedded engine's first round may deliver drafts, too.
    """
    asked = [request for request in requests(16) if len(request.prompt.tokens) > 1]
    sampling = ENDS[name]
    weights = WEIGHTS | half_wrong_drafter()
    embedded = EmbeddedEngine(CONFIG, weights.items(), max_total_tokens=8192)
    equal = 0
    try:
        engines["adaptive"].update_weights(1, weights.items())
        for steps in (1, 3):
            drawn = {}
            for engine in (engines["adaptive"], embedded):
                engine.set_config(k(steps))
                drawn[engine] = list(engine.generate(asked, sampling))
            theirs, ours = drawn.values()
            assert texts(theirs) == texts(ours)
            assert len(set(map(len, texts(ours)))) > 3 or name == "limit"
            for a, b in zip(theirs, ours, strict=True):
                first = dict(b.accepted_spans).get(0, 0) + 1
                assert delivered_tokens(a) == len(a.response) - 1
                assert delivered_tokens(b) == max(len(b.response) - first, 0)
                starts = rounds_of(a)
                own = {start: drafts for start, drafts in rounds_of(b).items() if start >= first}
                assert all(own[start] == starts[start] for start in own.keys() & starts.keys())
                if first == 1:
                    equal += 1
                    assert a.accepted == b.accepted and starts == own
        assert equal > 8
    finally:
        engines["adaptive"].update_weights(0, WEIGHTS.items())


def test_a_stop_string_ends_the_text_whatever_is_drafted(engines: dict[str, SGLangEngine]) -> None:
    """At the token at which the embedded engine ends it; also in a sample whose first tokens an engine drew before."""
    asked, stop = requests(24), ("dbe", "aec", "cbcd", "bb")
    whole = engines["plain"].generate(asked, SAMPLINGS["T=1"])
    sampling = replace(SAMPLINGS["T=1"], stop=stop)
    ends = [pieces.first_end(sample.response.tolist(), stop) for sample in whole]
    expected = [sample.response[:end].tolist() for sample, end in zip(whole, ends, strict=True)]
    assert len(set(ends)) > 8
    engines["adaptive"].set_config(k(3))
    engines["adaptive"].stats()
    for name in ("plain", "adaptive"):
        found = engines[name].generate(asked, sampling)
        assert texts(found) == expected, name
        for sample, other, end in zip(found, whole, ends, strict=True):
            assert sample.status == ("finished" if end < len(other.response) else other.status) or end == 48
    assert any(stats.accepted[1:] for stats in engines["adaptive"].stats() if sum(stats.accepted[1:]))
    begun = []
    for request, sample, end in zip(asked, whole, ends, strict=True):
        for cut in {end - 1, end} - {0}:
            partial = Partial(
                sample.response[:cut], sample.behaviour_logprobs[sample.prompt_len :][:cut], ((0, 0, cut),)
            )
            begun.append(replace(request, id=f"{request.id[:-1]}-{cut:03d}.", partial=partial))
    wanted = {request.id[:-1]: text for request, text in zip(asked, expected, strict=True)}
    for rule in (None, choosing(WORTH_IT["some"])):
        if rule is not None:
            engines["adaptive"].set_spec_rule(rule)
            assert texts(engines["adaptive"].generate(asked, sampling)) == expected
        gone_on = engines["adaptive"].generate(begun, sampling)
        assert all(sample.response.tolist() == wanted[sample.request_id[:-5]] for sample in gone_on)
    engines["adaptive"].set_config(k(3))


def delivered_tokens(sample: Sample) -> int:
    return sum((1 + i) * rounds for i, rounds in enumerate(sample.accepted))


def test_pushed_weights_are_the_served_ones(engines: dict[str, SGLangEngine]) -> None:
    engine = engines["adaptive"]
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    pushed = {name: tensor * 1.01 for name, tensor in WEIGHTS.items()}
    engine.update_weights(7, pushed.items())
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in pushed.items()}
    assert all(s.policy_versions == ((7, 0, len(s.response)),) for s in engine.generate(requests(3), SAMPLINGS["T=1"]))
    body = {"requests": [_body(requests(1, "known")[0], Sampling(max_new_tokens=150, ignore_eos=True))]}
    lines = list(engine.stream("generate", json=body | {"progress": True}))
    # What is known of a sample if its engine is lost.
    assert len(lines) > 2 and {line["version"] for line in lines if "drawn" in line} == {"7"}
    engine.update_weights(0, WEIGHTS.items())


def test_samples_continue_under_new_weights(engines: dict[str, SGLangEngine]) -> None:
    engine = engines["adaptive"]
    engine.set_config(OFF)
    end = started(engine, requests(2, "long"), Sampling(max_new_tokens=400, ignore_eos=True), least=5)
    engine.update_weights(8, WEIGHTS.items())
    done = end()
    for sample in done:
        (old, first, cut), (new, again, last) = sample.policy_versions
        assert (old, first, new, last) == (0, 0, 8, 400) and cut == again and 0 < cut < 400
    assert len(done) == 2
    engine.update_weights(0, WEIGHTS.items())
    engine.set_config(k(3))


def test_abort(engines: dict[str, SGLangEngine]) -> None:
    engine = engines["adaptive"]
    sampling = Sampling(max_new_tokens=2000, ignore_eos=True)
    asked = requests(3, "stop")
    samples: dict[str, Sample] = {}
    first = threading.Event()

    def ended(sample: Sample) -> None:
        samples[sample.request_id] = sample
        first.set()

    end = started(engine, asked, sampling, least=1, on_sample=ended)
    engine.abort(["stop-001.", "unknown"])
    assert first.wait(60) and set(samples) == {"stop-001."}
    engine.abort()
    end()
    assert set(samples) == {r.id for r in asked}
    for sample in samples.values():
        assert sample.status == "aborted" and 0 < len(sample.response) < 2000
        assert sample.behaviour_logprobs[sample.prompt_len :].all()


def begun(engine: SGLangEngine, asked: list[Request], sampling: Sampling) -> list[Request]:
    """Draw the first tokens of every sample, abort, and return the requests with them."""
    end = started(engine, asked, sampling, least=5)
    engine.abort([r.id for r in asked])
    drawn = end()
    assert all(s.status == "aborted" and 0 < len(s.response) < sampling.max_new_tokens for s in drawn)
    return [replace(r, partial=Partial.of(s)) for r, s in zip(asked, drawn, strict=True)]


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize("chosen", [False, True], ids=["all drafts", "chosen drafts"])
@pytest.mark.parametrize(("first", "second"), [("adaptive", "plain"), ("plain", "adaptive"), ("adaptive", "embedded")])
def test_a_sample_goes_on_on_another_engine(
    engines: dict[str, SGLangEngine], first: str, second: str, chosen: bool
) -> None:
    sampling = Sampling(max_new_tokens=500, ignore_eos=True)
    asked = requests(6, f"go-{second}")
    engines["adaptive"].set_config(k(2))
    embedded = EmbeddedEngine(CONFIG, WEIGHTS.items(), config=SpecConfig(2), max_length=1300)
    whole = engines["plain"].generate(asked, sampling)
    if chosen:
        for engine in (engines["adaptive"], embedded):
            engine.set_spec_rule(choosing(WORTH_IT["some"]))
            engine.generate(requests(16, "before"), SAMPLINGS["T=1"])  # from which it learns
            engine.stats()
    partials = begun(engines[first], asked, sampling)
    engines["adaptive"].stats()
    done = (engines | {"embedded": embedded})[second].generate(partials, sampling)
    ran = embedded.stats() + engines["adaptive"].stats()
    rounds = pooled(s.accepted for s in ran).sum()
    if chosen and second != "plain":
        assert 0.05 < sum(s.verified for s in ran) / (3 * rounds) < 0.95
    differing = 0
    for sample, request, reference in zip(done, partials, whole, strict=True):
        old = request.partial
        middle = len(old.response)
        assert sample.status == "truncated" and len(sample.response) == 500
        differing += sample.response.tolist() != reference.response.tolist()
        drawn = sample.behaviour_logprobs[sample.prompt_len :]
        np.testing.assert_array_equal(drawn[:middle], old.logprobs)
        assert sample.policy_versions[0][1] == 0 and sample.policy_versions[-1][2] == 500
        assert all(a[2] == b[1] for a, b in itertools.pairwise(sample.policy_versions))
        assert sample.accepted_spans[: len(old.accepted_spans)] == old.accepted_spans
        if second != "plain":
            assert sample.accepted_spans[-1][1] > middle
    assert differing == 0
    news = sum(sum(s.accepted) - sum(r.partial.accepted) for s, r in zip(done, partials, strict=True))
    assert rounds - len(asked) <= news <= rounds


def test_round_statistics_agree_with_the_samples(engines: dict[str, SGLangEngine]) -> None:
    engine = engines["adaptive"]
    engine.set_config(k(2))
    engine.stats()
    samples = engine.generate(requests(6), Sampling(max_new_tokens=30, ignore_eos=True))
    stats = engine.stats()
    assert {s.config for s in stats} == {SpecConfig(2)}
    by_round = np.zeros(3)
    by_sample = np.zeros(3)
    for s in stats:
        by_round[: len(s.accepted)] += s.accepted
    for sample in samples:
        by_sample[: len(sample.accepted)] += sample.accepted
        assert delivered_tokens(sample) == 29  # the prompt's pass drew the first one
    assert by_round.sum() == by_sample.sum() and by_round @ np.arange(3) >= by_sample @ np.arange(3)
    timed = [s for s in stats if s.rounds]
    assert timed and all(s.ms > 0 and s.context_tokens >= s.batch for s in timed)
    engines["plain"].stats()
    engines["plain"].generate(requests(2), Sampling(max_new_tokens=10, ignore_eos=True))
    assert {s.config for s in engines["plain"].stats()} == {OFF}


def slime_pushes(engine: SGLangEngine, version: int, left_out: str = "") -> dict[str, int]:
    """Push so that SGLang acknowledges all tensors, although `left_out` did not reach the served model."""
    tensors = {name: t + version * 2.0**-12 for name, t in WEIGHTS.items()}
    sent = tensors | ({left_out: WEIGHTS[left_out] + 1} if left_out else {})
    engine.update_weights(version, sent.items())
    return {name: fingerprint(t) for name, t in tensors.items()}


def test_a_drafter_left_out_of_a_push_is_named_and_does_not_draft(
    engines: dict[str, SGLangEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """The contract around slime's pushes: found, pushed again, held, and released by a complete push."""
    engine = engines["adaptive"]
    stale = "model.mtp_layers.0.input_proj.weight"
    other = "model.norm.weight"
    engine.set_config(k(2))

    def is_drafter(name: str) -> bool:
        return "mtp_" in name

    def pushed(version: int, *left_out: str) -> tuple[float, float]:
        """Return the incidents, and the engines that do not speculate."""
        pushes = iter(left_out)

        def push() -> dict[str, int]:
            return slime_pushes(engine, version, next(pushes))

        metrics = after_push([engine.url], push(), version, is_drafter, push)
        return metrics["health/incidents"], metrics["health/plain_engines"]

    assert pushed(50, "") == (0, 0)
    assert pushed(51, stale, "") == (1, 0) and stale in caplog.text
    assert engine.describe()["held"] == ""
    assert pushed(52, stale, stale) == (1, 1)
    assert stale in engine.describe()["held"]
    engine.set_config(k(2))  # during a hold, a new schedule does not enable speculation
    engine.stats()
    engine.generate(requests(2), Sampling(max_new_tokens=6, ignore_eos=True))
    assert {s.config for s in engine.stats()} == {OFF}
    assert pushed(53, "") == (0, 0)
    engine.generate(requests(2), Sampling(max_new_tokens=6, ignore_eos=True))
    assert SpecConfig(2) in {s.config for s in engine.stats()}
    with pytest.raises(HealthError, match=rf"fingerprint: holds otherwise {other}$"):
        pushed(54, other, other)
    with pytest.raises(HealthError, match="session: names version 55, expected 56"):
        after_push([engine.url], slime_pushes(engine, 55), 56, is_drafter)
    assert engine.describe()["held"] and pushed(57, "") == (0, 0)
    assert not engine.describe()["held"]


def test_the_canary_finds_a_wrong_drafter_that_fingerprints_cannot(engines: dict[str, SGLangEngine]) -> None:
    """The engine holds what the trainer pushed, which is wrong: the halves of the input projection are exchanged."""
    engine = engines["adaptive"]
    agreeing = tiny_mimo.agreeing(WEIGHTS, CONFIG["vocab_size"])
    name = "model.mtp_layers.0.input_proj.weight"
    half = CONFIG["hidden_size"]
    swapped = agreeing | {name: torch.cat([agreeing[name][:, half:], agreeing[name][:, :half]], 1)}
    configs = [SpecConfig.from_json(value) for value in engine.describe()["configs"]]
    settings = HealthSettings(canary_share=1.0, canary_tokens=24)
    learning = Learning([0, 1, 2, 3], Roofline.of_model(CONFIG, 64.0))
    speculation = SlimeDraftRule(learning, configs, settings)
    prompts = [r.prompt.tokens.tolist() for r in requests(6)]
    greedy = Sampling(temperature=0, ignore_eos=True)

    def pushed(version: int, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        engine.update_weights(version, tensors.items())
        marks = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        assert after_push([engine.url], marks, version, bool)["health/incidents"] == 0
        return speculation.canary([engine.url], prompts, greedy)

    found = pushed(70, agreeing)
    assert found["health/canary_failures"] == 0 and found["health/canary_accept_length"] > 3
    assert engine.stats() == [], "a canary's rounds must not be counted"
    assert speculation.canary([engine.url], prompts, greedy) == {}, "it was heard under these weights"
    failed = pushed(71, swapped)
    assert failed["health/canary_failures"] == 1 and failed["health/canary_accept_length"] < 2
    assert "accept length" in engine.describe()["held"]
    assert pushed(72, agreeing)["health/canary_failures"] == 0 and not engine.describe()["held"]
    engine.update_weights(0, WEIGHTS.items())


def test_an_engine_with_a_key_refuses_requests_without_it(engines: dict[str, SGLangEngine], monkeypatch) -> None:
    engine = engines["plain"]
    monkeypatch.setenv("RLSPEC_API_KEY", "right-key")
    assert SGLangEngine(engine.url).describe() == engine.describe()
    for key, told in {"": "a key, and was given none", "wrong-key": "another key than the one it was given"}.items():
        monkeypatch.setenv("RLSPEC_API_KEY", key)
        stranger = SGLangEngine(engine.url)
        for call in (stranger.describe, lambda it=stranger: it.update_weights(9, WEIGHTS.items())):
            with pytest.raises(EngineError) as refusal:
                call()
            said = f"{engine.url}: it needs {told}; set RLSPEC_API_KEY to the key it was served with"
            assert str(refusal.value) == said
    process = engine._process
    seen = process.log.read_text() + " ".join(subprocess.check_output(["ps", "axww", "-o", "args"], text=True).split())
    assert "right-key" not in seen


@pytest.mark.slow
def test_sglang_is_unchanged_unless_the_plugin_is_enabled() -> None:
    script = """
from megatron_rlspec.rollout.sglang.cpu import stand_ins as cpu_stand_ins
cpu_stand_ins.install()
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
assert "megatron_rlspec.rollout.sglang.http.plugin" in sys.modules, "entry point not found"
assert not HookRegistry._hooks and not HookRegistry._patched, HookRegistry._hooks
assert "megatron_rlspec.rollout.sglang.scheduler.verifier" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def started(
    engine: SGLangEngine,
    asked: list[Request],
    sampling: Sampling,
    least: int,
    on_sample: Callable[[Sample], None] | None = None,
) -> Callable[[], list[Sample]]:
    """Start samples, return when each has `least` tokens; the result waits for their end."""
    found: list[list[Sample]] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(asked, sampling, on_sample)))
    thread.start()
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        lengths = [held.context - held.prompt for held in engine.progress().running]
        if len(lengths) == len(asked) and min(lengths) >= least:
            break

    def end() -> list[Sample]:
        thread.join(600)
        return found[0]

    return end


@pytest.mark.lossless
def test_an_aborted_sample_holds_no_token_after_its_end(engines: dict[str, SGLangEngine]) -> None:
    """The round that an abort waits for can hold a stop token, and tokens after it; then the sample has ended."""
    stops = (2, *range(3, 160, 8))  # 2 ends every text
    sampling = Sampling(max_new_tokens=400, stop_token_ids=stops)
    engine = engines["adaptive"]
    samples: list[Sample] = []
    for seed in range(9300, 9800, 100):  # on a busy machine all may end before the first one is asked to leave
        prompts = [Prompt(i, np.random.default_rng(seed + i).integers(3, 160, 20)) for i in range(32)]
        asked = [Request(f"ends{seed}-{i:03d}.", prompt, seed=seed + i) for i, prompt in enumerate(prompts)]
        thread = threading.Thread(target=lambda asked=asked: samples.extend(engine.generate(asked, sampling)))
        thread.start()
        left: set[str] = set()
        while thread.is_alive():
            here = [held.id for held in engine.progress().running if held.id not in left]
            if here:
                engine.abort([here[0]])
                left.add(here[0])
        if {sample.status for sample in samples} == {"finished", "aborted"}:
            break
    assert {sample.status for sample in samples} == {"finished", "aborted"}
    for sample in samples:
        stopped = np.flatnonzero(np.isin(sample.response, stops)).tolist()
        assert stopped == ([len(sample.response) - 1] if sample.status == "finished" else []), sample


@pytest.mark.slow
def test_loss_of_an_engine(engines: dict[str, SGLangEngine]) -> None:
    """This test runs last, since it ends a server. The pool finishes the work on the other one, with the same text."""
    sampling = Sampling(max_new_tokens=1200, ignore_eos=True)
    asked = requests(8, "lost")
    engines["adaptive"].set_config(k(3))
    expected = engines["adaptive"].generate(asked, sampling)
    pool = EnginePool({name: engines[name] for name in ("plain", "adaptive")})
    survivor = engines["adaptive"].generate
    sent: list[Request] = []
    engines["adaptive"].generate = lambda asked, *rest: sent.extend(asked) or survivor(asked, *rest)
    stream = engines["plain"].stream

    def closes(path: str, **options: object) -> Iterator[dict]:
        for i, line in enumerate(stream(path, **options)):
            if i == 8:  # of four samples, each of which has sent two lines
                threading.Thread(target=engines["plain"].close).start()
            yield line

    engines["plain"].stream = closes
    samples = pool.generate(asked, sampling)
    del engines["adaptive"].generate, engines["plain"].stream
    moved = sent[4:]
    assert len(moved) == 4 and all(64 < len(r.partial.response) < 1200 for r in moved)
    by_id = {s.request_id: s for s in expected}
    for request in moved:
        first = len(request.partial.response)
        assert request.partial.response.tolist() == by_id[request.id].response[:first].tolist()
        logprobs = by_id[request.id].behaviour_logprobs[by_id[request.id].prompt_len :]
        np.testing.assert_allclose(request.partial.logprobs, logprobs[:first], atol=2e-4)
    assert texts(samples) == texts(expected)
    assert pool.engines == {"adaptive": engines["adaptive"]} and len(pool.failures) == 1
    with pytest.raises(EngineError, match="the engine"):
        engines["plain"].generate(asked[:1], sampling)


def test_an_engine_that_slept_serves_nothing_until_all_weights_are_pushed(engines: dict[str, SGLangEngine]) -> None:
    """On a CPU SGLang's release frees nothing; its order and its refusals are those of a GPU."""
    engine = engines["adaptive"]
    asked = requests(3, "sleep")
    engine.update_weights(1, WEIGHTS.items())
    before = texts(engine.generate(asked, SAMPLINGS["T=1"]))
    engine.sleep()
    slept = "it slept, and no weights were pushed since"
    with pytest.raises(EngineError, match=slept):
        engine.generate(asked, SAMPLINGS["T=1"])
    engine.wake()
    with pytest.raises(EngineError, match=slept):
        engine.generate(asked, SAMPLINGS["T=1"])
    engine.update_weights(1, WEIGHTS.items())
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    assert texts(engine.generate(asked, SAMPLINGS["T=1"])) == before
