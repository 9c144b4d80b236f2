"""The embedded engine against a naive decoder, Transformers, and itself under other schedules of the same work."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import embedded_oracle as oracle
import numpy as np
import pytest
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.embedded import draft
from megatron_rlspec.rollout.embedded import engine as embedded_engine
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

torch.set_num_threads(1)
FREE = Sampling(max_new_tokens=16, ignore_eos=True)
PROMPTS = [[7, 3, 9, 4, 4, 21], [5], [11, 2], [30, 1, 1, 8, 19, 25, 6, 13, 14, 2, 9]]


def texts(samples):
    return [s.response.tolist() for s in samples]


@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_are_the_naive_decoders(tied):
    model = oracle.tiny(tied=tied)
    engine = oracle.engine_of(*model, SpecConfig(3))
    for sample in engine.generate(oracle.requests(PROMPTS), Sampling(temperature=0.7, max_new_tokens=8)):
        tokens = sample.tokens.tolist()
        expected = torch.log_softmax(oracle.Oracle(*model).logits(tokens) / 0.7, -1)
        picked = [float(expected[i - 1, tokens[i]]) for i in range(sample.prompt_len, len(tokens))]
        np.testing.assert_allclose(sample.behaviour_logprobs[sample.prompt_len :], picked, atol=1e-6)
        assert (sample.behaviour_logprobs[: sample.prompt_len] == 0).all()
        assert sample.loss_mask.tolist() == [0] * sample.prompt_len + [1] * len(sample.response)
    if tied:  # a push may bring the head, too
        config, tensors = model
        engine.update_weights(1, [*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"])])


def test_held_engine_does_not_speculate_and_keeps_what_is_set_during_the_hold(model):
    engine = oracle.engine_of(*model, SpecConfig(3))
    asked = oracle.requests([p for p in PROMPTS if len(p) > 1])
    drafted = texts(engine.generate(asked, FREE))
    engine.hold("fingerprint: another drafter")
    assert engine.describe()["held"] == "fingerprint: another drafter"
    engine.set_config(SpecConfig(2))
    engine.stats()
    assert texts(engine.generate(asked, FREE)) == drafted
    assert {s.config for s in engine.stats()} == {OFF}
    engine.release()
    engine.release()
    assert engine.describe()["held"] == "" and engine.alive
    assert texts(engine.generate(asked, FREE)) == drafted
    assert {s.config for s in engine.stats()} == {SpecConfig(2)}
    engine.close()
    assert not engine.alive


@pytest.mark.parametrize("catch_up", [False, True])
def test_draft_logits_are_the_naive_drafters_at_every_depth(model, monkeypatch, catch_up):
    """Also after rounds without speculation: the catch-up leaves the drafter where it would have been."""
    seen = []

    def recording(logits):
        token = logits.argmax(-1)
        lengths = [int(engine.cache.length[r.row]) for r in engine.running if engine.rounds.ready(r.row)]
        seen.append((logits.clone(), token.tolist(), lengths))
        return logits.log_softmax(-1).amax(-1), token

    monkeypatch.setattr(draft, "likeliest", recording)
    engine = oracle.engine_of(*model, SpecConfig(3), prefill_chunk=4, drafts="argmax")
    if catch_up:  # off below 30 tokens of context, 17 at the start
        monkeypatch.setattr(engine.choice, "choose", lambda _, context, __: OFF if context < 30 else SpecConfig(3))
    samples = engine.generate(oracle.requests([PROMPTS[0], PROMPTS[3]]), Sampling(max_new_tokens=24, ignore_eos=True))
    naive = oracle.Oracle(*model)
    rounds = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert sum(rounds[0][0][2]) >= 30 if catch_up else len(rounds[0][0][2]) == 1
    both = [steps for steps in rounds if len(steps[0][2]) == 2]
    assert len(both) >= 2
    for steps in both[:2]:
        assert steps[0][2] == steps[1][2] == steps[2][2]
        for i, sample in enumerate(samples):
            chain = [step[1][i] for step in steps]
            expected = naive.draft_logits(sample.tokens[: steps[0][2][i]].tolist(), chain[:2])
            for d in range(3):
                torch.testing.assert_close(steps[d][0][i], expected[d], rtol=0, atol=1e-10)


def test_samples_are_complete_and_the_cache_is_empty_afterwards(model):
    engine = oracle.engine_of(*model, SpecConfig(3), max_total_tokens=330, max_running_requests=5)
    stop = Sampling(max_new_tokens=12, stop_token_ids=(3, 4, 5, 6), ignore_eos=False)
    told = []
    samples = engine.generate(oracle.requests(PROMPTS, group=4), stop, on_sample=told.append)
    assert sorted(map(id, told)) == sorted(map(id, samples))
    assert [s.request_id for s in samples] == [r.id for r in oracle.requests(PROMPTS, group=4)]
    for s in samples:
        ended = s.tokens[-1] in (0, 3, 4, 5, 6)
        assert s.status == ("finished" if ended else "truncated")
        assert ended or len(s.response) == 12
        assert not set(s.response[:-1].tolist()) & {0, 3, 4, 5, 6}
        assert s.policy_versions == ((0, 0, len(s.response)),)
        first = dict(s.accepted_spans).get(0, 0) + 1  # tokens of the first round, which is not counted
        assert sum((i + 1) * n for i, n in enumerate(s.accepted)) == max(len(s.response) - first, 0)
        assert all(b > last for (_, last), (b, _) in itertools.pairwise(s.accepted_spans))
    assert any(s.accepted_spans for s in samples)
    assert engine.cache.left == engine.cache.total and not engine.cache.prefixes
    rounds = engine.stats()
    assert sum(sum(r.accepted) for r in rounds) == sum(r.rounds * r.batch for r in rounds)
    assert {r.config for r in rounds} <= {SpecConfig(3), OFF} and engine.stats() == []


def test_a_group_prefills_and_drafts_over_its_prompt_once(model):
    prompt = list(range(1, 31))
    forwarded = {"target": 0, "draft": 0}

    def counting(engine):
        for name, argument in (("target", 0), ("draft", 1)):
            inner = getattr(engine.model, name)

            def count(*args, inner=inner, name=name, argument=argument):
                forwarded[name] += len(args[argument])
                return inner(*args)

            setattr(engine.model, name, count)
        return engine

    one = Sampling(max_new_tokens=1, ignore_eos=True)
    counting(oracle.engine_of(*model, SpecConfig(1))).generate(oracle.requests([prompt], group=8), one)
    # 29 shared tokens, then the pending one and one draft for each of eight; 28 shared pairs and one for each
    assert forwarded == {"target": 29 + 8 * 2, "draft": 28 + 8}


def test_off_pays_no_drafter(model):
    engine = oracle.engine_of(*model, OFF)

    def never(*args):
        raise AssertionError("the drafter ran while speculation was off")

    engine.model.draft = never
    engine.generate(oracle.requests(PROMPTS), FREE)
    with pytest.raises(AssertionError, match="drafter ran"):
        engine.set_config(SpecConfig(0))
        engine.generate(oracle.requests(PROMPTS[3:]), FREE)


def test_update_weights_in_place_and_fingerprints(model):
    config, tensors = model
    _, other = oracle.tiny(seed=5, drafter="close", sharpness=2.0)
    engine = oracle.engine_of(config, tensors, SpecConfig(3))
    pointers = {name: shard.view.data_ptr() for name, shard in engine.model.tensors.items()}
    before = texts(engine.generate(oracle.requests(PROMPTS), FREE))
    engine.update_weights(1, other.items())
    assert pointers == {name: shard.view.data_ptr() for name, shard in engine.model.tensors.items()}
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in other.items()}
    after = engine.generate(oracle.requests(PROMPTS), FREE)
    fresh = oracle.engine_of(config, other, SpecConfig(3)).generate(oracle.requests(PROMPTS), FREE)
    assert texts(after) == texts(fresh) != before
    assert after[0].policy_versions == ((1, 0, 16),)
    mtp = {name: t for name, t in tensors.items() if "mtp" in name}
    engine.update_weights(2, mtp.items(), scope="drafter")
    assert texts(engine.generate(oracle.requests(PROMPTS), FREE)) == texts(fresh)
    assert engine.fingerprints()["model.mtp_layers.0.input_proj.weight"] == fingerprint(
        tensors["model.mtp_layers.0.input_proj.weight"]
    )


def test_a_failed_update_serves_nothing_until_one_succeeds(model):
    config, tensors = model
    engine = oracle.engine_of(config, tensors)
    part = {k: v for k, v in tensors.items() if "layers.1." not in k}
    wrong = tensors | {"model.norm.weight": torch.ones(3, dtype=torch.float64)}
    unknown = {"model.layers.9.mlp.up_proj.weight": torch.ones(1)}
    for bad, message in (
        (wrong, r"shape \(3,\), expected \(16,\)"),
        (unknown, "unexpected"),
        (part, "are missing now"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.update_weights(1, bad.items())
        with pytest.raises(EngineError, match="version 1 did not finish"):
            engine.generate(oracle.requests(PROMPTS), FREE)
    engine.update_weights(2, tensors.items())
    assert len(engine.generate(oracle.requests(PROMPTS), FREE)) == 4
    with pytest.raises(EngineError, match="26 of 43 tensors never arrived"):
        oracle.engine_of(config, dict(list(tensors.items())[:17]))


def test_drafts_are_the_likeliest_of_the_words_and_follow_updates(model):
    """All words but one are as good as all, if that one is never drafted; an update of the head renews its rows."""
    config, tensors = model
    seen = []
    engine = oracle.engine_of(*model, SpecConfig(2))
    drafting = engine.rounds._draft
    engine.rounds._draft = lambda *arguments: seen.append(drafting(*arguments)) or seen[-1]
    asked = oracle.requests([p for p in PROMPTS if len(p) > 1])
    expected = texts(engine.generate(asked, FREE))
    drafted = {int(t) for chains in seen for t in chains.tokens[:, 1:].ravel()}
    words = np.array(sorted({*range(config["vocab_size"])} - {min(drafted)}))
    full = [chains.tokens for chains in seen]
    engine.set_draft_vocabulary(words)
    seen.clear()
    assert texts(engine.generate(asked, FREE)) == expected
    assert not any((chains.tokens[:, 1:] == min(drafted)).any() for chains in seen)
    never = next(n for n in range(config["vocab_size"]) if n not in drafted)
    engine.set_draft_vocabulary(np.array(sorted({*range(config["vocab_size"])} - {never})))
    seen.clear()
    engine.generate(asked, FREE)
    assert all(np.array_equal(a, chains.tokens) for a, chains in zip(full, seen, strict=True))
    engine.set_draft_vocabulary(words)
    swapped = {**tensors, "lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}
    engine.update_weights(2, swapped.items())
    fresh = EmbeddedEngine(config, swapped.items(), dtype=torch.float64)
    fresh.set_draft_vocabulary(words)
    assert torch.equal(engine.model.draft_head, fresh.model.draft_head)
    for wrong in ([], [1, 1], [-1], [config["vocab_size"]]):
        with pytest.raises(EngineError, match="expected different ids from 0 to 31"):
            engine.set_draft_vocabulary(np.array(wrong, np.int64))


def test_broken_weights_leave_nothing_behind(model):
    """NaN in keys that a later sample's padded columns read must not spread."""
    config, tensors = model
    engine = oracle.engine_of(config, tensors, SpecConfig(2))
    expected = texts(engine.generate(oracle.requests(PROMPTS), FREE))
    engine.update_weights(1, [(k, torch.full_like(v, float("nan"))) for k, v in tensors.items()])
    engine.generate(oracle.requests(PROMPTS), FREE)
    engine.update_weights(2, tensors.items())
    assert texts(engine.generate(oracle.requests(PROMPTS), FREE)) == expected


def test_an_update_in_the_middle_recomputes_and_records_both_versions(model):
    config, tensors = model
    _, other = oracle.tiny(seed=5, drafter="close", sharpness=2.0)
    engine = oracle.engine_of(config, tensors, SpecConfig(2))
    long = Sampling(max_new_tokens=200, ignore_eos=True)
    done = []
    thread = threading.Thread(
        target=lambda: done.extend(engine.generate(oracle.requests(PROMPTS[:1], group=3), long)), daemon=True
    )
    thread.start()
    while not any(len(run.response) > 10 for run in engine.running):
        time.sleep(0.001)
    engine.update_weights(7, other.items())
    thread.join(120)
    for s in done:
        (first, _, switch), (second, begin, end) = s.policy_versions
        assert (first, second) == (0, 7) and switch == begin and end == len(s.response) == 200
        switch += s.prompt_len
        # What follows the switch is what the new weights give after the same tokens: nothing stale was read.
        prompt = Prompt(9, s.tokens[:switch])
        fresh = oracle.engine_of(config, other, OFF)
        rest = Sampling(max_new_tokens=206 - switch, ignore_eos=True)
        seed = next(r.seed for r in oracle.requests(PROMPTS[:1], group=3) if r.id == s.request_id)
        assert fresh.generate([Request("x", prompt, seed)], rest)[0].response.tolist() == s.tokens[switch:].tolist()


def test_a_closed_engine_returns_no_aborted_samples(model):
    """The caller of `generate` asked for no abort: it learns that the engine is gone, and what its samples had."""
    engine = oracle.engine_of(*model)
    failed = []

    def draw():
        try:
            engine.generate(oracle.requests(PROMPTS), Sampling(max_new_tokens=200, ignore_eos=True))
        except EngineError as error:
            failed.append(error)

    thread = threading.Thread(target=draw, daemon=True)
    abort = engine.abort

    def ends(*ids):
        abort(*ids)
        thread.join(120)

    engine.abort = ends  # the rounds go on while `close` runs
    thread.start()
    while not any(len(run.response) > 5 for run in engine.running):
        time.sleep(0.001)
    engine.close()
    thread.join(120)
    assert [str(error) for error in failed] == ["embedded engine: closed"]
    assert set(failed[0].begun) == {request.id for request in oracle.requests(PROMPTS)}


def test_callers_share_rounds(model):
    engine = oracle.engine_of(*model, SpecConfig(2))
    alone = [texts(engine.generate(oracle.requests(PROMPTS, seed=s), FREE)) for s in range(4)]
    engine.stats()
    results = [None] * 4
    serve, queued = engine._serve, threading.Event()
    engine._serve = lambda: serve() if queued.is_set() else None  # all four are queued before the first round

    def call(s):
        wanted = [Request(f"{s}/{r.id}", r.prompt, r.seed) for r in oracle.requests(PROMPTS, seed=s)]
        results[s] = texts(engine.generate(wanted, FREE))

    threads = [threading.Thread(target=call, args=(s,), daemon=True) for s in range(4)]
    for thread in threads:
        thread.start()
    while len(engine.waiting) < 16:
        time.sleep(0.001)
    queued.set()
    for thread in threads:
        thread.join(120)
    assert results == alone
    assert max(r.batch for r in engine.stats()) == 16


def test_what_the_engine_refuses(model):
    config, tensors = model
    engine = oracle.engine_of(config, tensors)
    with pytest.raises(EngineError, match="expected at most 64 drafts"):
        engine.set_config(SpecConfig(100))
    plain = {k: v for k, v in tensors.items() if "mtp" not in k}
    qwen = config | {"architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(EngineError, match="k1 needs a drafter"):
        oracle.engine_of(qwen, plain, SpecConfig(1))
    with pytest.raises(ValueError, match="GptForCausalLM"):
        oracle.engine_of(config | {"architectures": ["GptForCausalLM"]}, tensors)
    with pytest.raises(ValueError, match="does not hold one sample"):
        oracle.engine_of(config, tensors, max_total_tokens=100)
    with pytest.raises(EngineError, match="300 prompt tokens; expected 1 to 255"):
        engine.generate(oracle.requests([[1] * 300]), FREE)
    with pytest.raises(EngineError, match="already in use"):
        engine.generate(oracle.requests([[1]]) * 2, FREE)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(oracle.requests([[1]]), FREE)


@pytest.mark.parametrize(
    ("verifier", "spec"),
    [
        ("position_keyed", SpecConfig(2)),
        ("target_only", SpecConfig(3)),
    ],
    ids=str,
)
def test_a_prompt_of_one_token_leaves_the_drafts_of_others_as_they_are(model, spec, verifier):
    """It drafts from its second token on; the others' rounds are what they are without it."""
    asked = oracle.requests([p for p in PROMPTS if len(p) > 1])
    lone = [Request("lone.", Prompt(9, np.array([5])), 77)]
    engine = oracle.engine_of(*model, spec, verifier=verifier)
    alone = engine.generate(asked, FREE)
    engine.stats()
    *together, single = engine.generate(asked + lone, FREE)
    stats = engine.stats()
    assert [s.accepted_spans for s in together] == [s.accepted_spans for s in alone]
    assert texts(together) == texts(alone) and {s.config for s in stats} == {spec, OFF}
    counted = sum(sum(s.accepted) for s in (*together, single))
    assert sum(map(sum, (s.accepted for s in stats))) == counted + len(together) + 1  # the first round of each
    assert texts([single]) == texts(oracle.engine_of(*model, OFF, verifier=verifier).generate(lone, FREE)) or (
        verifier == "target_only"
    )


COST = Roofline.of_layers(12, ridge_tokens=1024)


def shares(engine, data, sampling):
    """Return the share of rounds without drafts, by the rule of this data."""
    engine.set_spec_rule(data)
    engine.generate(oracle.requests([[1, 2, 3]], group=64), sampling)
    ran = engine.spec_rule_report()["rounds"]
    return ran.get("off", 0) / sum(ran.values())


@pytest.mark.parametrize("dear", [2.4, 1.2])
def test_drafts_that_cost_more_than_they_save_are_noticed_by_their_durations(monkeypatch, dear):
    """All drafts are accepted (greedy, all logits 0), but a round with one draft can take 2.4 times as long for twice
    the text. Counting layers alone promises a gain."""
    config, tensors = oracle.tiny(vocab=64)
    tensors = {name: torch.zeros_like(x) for name, x in tensors.items()}
    engine = EmbeddedEngine(config, tensors.items(), dtype=torch.float32, candidates=[OFF, SpecConfig(1)])
    seconds = 0.0
    run = engine.rounds.round

    def timed(rows, spec):
        nonlocal seconds
        seconds += 1e-4 + 1e-5 * len(rows) * (1 if spec.off else dear)
        return run(rows, spec)

    monkeypatch.setattr(engine.rounds, "round", timed)
    monkeypatch.setattr(embedded_engine, "time", SimpleNamespace(perf_counter=lambda: seconds, sleep=time.sleep))
    greedy = Sampling(temperature=0, max_new_tokens=80, ignore_eos=True)
    off = shares(engine, {"roofline": COST.to_json()}, greedy)
    assert off > 0.6 if dear > 2 else off < 0.2, off


def test_what_the_engine_would_compute_otherwise_is_refused(model):
    config, tensors = model
    for key, value in (("use_sliding_window", True), ("rope_scaling", {"rope_type": "linear", "factor": 2.0})):
        with pytest.raises(ValueError, match=f"the embedded engine's model: {key}"):
            oracle.engine_of(config | {key: value}, tensors)
    with pytest.raises(ValueError, match="verifier='positions'; known: "):
        oracle.engine_of(config, tensors, verifier="positions")
