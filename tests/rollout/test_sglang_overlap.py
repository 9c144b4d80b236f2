"""SGLang's overlap scheduler with our hooks, on the CPU: the results of a round are read a round late.

The first engine does all that an engine on a GPU does by default (`emulation.py`): it overlaps
rounds, its passes return views of buffers that the next pass overwrites with NaN, and sequence lengths stay on the
device. The second one only overlaps, so its rounds without drafts are plain decode passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import emulated_graphs
import emulation
import numpy as np
import pytest
import requests
import test_sglang_engine as same
import tiny_mimo
from certain_costs import certain
from taking_turns import taking_turns
from test_sglang_engine import CONFIG, SERVE, WEIGHTS, k, texts

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Prompt, Request, Sample, Sampling, SpecConfig

pytestmark = pytest.mark.slow
KEY = "right-key"
EMULATED = {"like a GPU": ",".join(emulation.PARTS), "overlap only": "overlap"}
Engines = dict[str, SGLangEngine]
Turns = TypeVar("Turns")  # the samples of a test's turns
LOGS: dict[str, Path] = {}  # of the engines of `EMULATED`


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mimo.write(tmp_path_factory.mktemp("tiny") / "mimo", CONFIG, WEIGHTS)


@pytest.fixture(autouse=True)
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the key to clients that know an address only."""
    monkeypatch.setenv("RLSPEC_API_KEY", KEY)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    arguments = [*SERVE, *same.LAUNCHES["plain"]]
    log = tmp_path_factory.mktemp("logs") / "plain.log"
    with launch(checkpoint, log, arguments=arguments, api_key=KEY) as process:
        yield SGLangEngine.of(process.wait(), timeout=120)


# what rounds of plain decode passes could change
OF_PLAIN_ROUNDS = {
    "test_the_engine_overlaps",
    "test_text_is_the_targets",
    "test_results_equal_those_without_overlap",
    "test_a_later_turn_finds_no_hole_in_the_drafters_cache",
    "test_a_request_that_ends_while_off_adds_no_unread_tokens_to_the_prefix_tree",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engines" in metafunc.fixturenames:
        every = metafunc.function.__name__ in OF_PLAIN_ROUNDS
        metafunc.parametrize("engines", list(EMULATED)[: 2 if every else 1], indirect=True, scope="module")


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, plain: SGLangEngine, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    environment = {emulation.VARIABLE: EMULATED[request.param]}
    arguments = [*SERVE, *same.LAUNCHES["adaptive"]]
    log = LOGS[request.param] = tmp_path_factory.mktemp("logs") / "overlap.log"
    with emulation.launch(checkpoint, log, arguments, environment, KEY) as process:
        yield {"adaptive": SGLangEngine.of(process.wait(), timeout=120), "plain": plain}


def test_the_engine_overlaps(engines: Engines) -> None:
    for engine in engines.values():
        answer = requests.get(f"{engine.url}/server_info", headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
        assert answer.json()["disable_overlap_schedule"] is False


@pytest.mark.lossless
@pytest.mark.parametrize("sampling", ["T=1", "greedy", "filtered"])
def test_text_is_the_targets(engines: Engines, sampling: str) -> None:
    same.test_text_does_not_depend_on_speculation(engines, sampling)


@pytest.mark.lossless
@pytest.mark.parametrize("sampling", ["T=1", "filtered"])
def test_text_does_not_depend_on_which_drafts_are_verified(engines: Engines, sampling: str) -> None:
    same.test_text_does_not_depend_on_which_drafts_are_verified(engines, sampling)
    assert emulated_graphs.REPLAYED in LOGS["like a GPU"].read_text()


@pytest.mark.lossless
def test_rounds_of_a_biased_batch_are_even(engines: Engines) -> None:
    """SGLang adds biases to even rows. With graphs that are captured by tokens such rounds need a layout, too."""
    engine = engines["adaptive"]
    sampling = {"max_new_tokens": 40, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": list(range(20, 40)), "sampling_params": sampling | {"logit_bias": {"40": 3.0, "50": 3.0}}}
    headers = {"Authorization": f"Bearer {KEY}"}

    def text() -> list[int]:
        engine.stats()
        return requests.post(f"{engine.url}/generate", json=body, headers=headers, timeout=60).json()["output_ids"]

    try:
        engine.set_config(OFF)
        plain = text()
        engine.set_spec_rule(same.choosing(same.WORTH_IT["none"]))
        engine.generate(same.requests(16), Sampling(max_new_tokens=40, ignore_eos=True))  # from which it learns
        learnt = engine.stats()
        assert sum(s.verified for s in learnt) < 2.5 * sum(sum(s.accepted) for s in learnt)
        assert text() == plain
        rounds = engine.stats()
        assert sum(s.verified for s in rounds) == 3 * sum(sum(s.accepted) for s in rounds) > 0
    finally:
        engine.set_config(k(3))


SAME = [
    same.test_drafting_after_off_equals_drafting_after_step_0,
    same.test_abort,
    same.test_round_statistics_agree_with_the_samples,
    same.test_samples_continue_under_new_weights,
]


@pytest.mark.parametrize("check", SAME, ids=lambda check: check.__name__[5:])
def test_results_equal_those_without_overlap(engines: Engines, check: Callable[[Engines], None]) -> None:
    check(engines)


def test_an_aborted_sample_holds_no_token_after_its_end(engines: Engines) -> None:
    engine = engines["adaptive"]
    engine.set_config(k(3))
    same.test_an_aborted_sample_holds_no_token_after_its_end({"adaptive": engine})


def test_a_probe_lets_some_drafters_catch_up_and_drafting_lets_all(engines: Engines) -> None:
    """While off, the drafters of 3 of 12 requests catch up in trials; the others draft at random in those rounds.

    By this rule's costs, drafting is faster once contexts are long. From then on, a round accepts the same drafts as in
    a run whose drafter was never off, if both start the round at the same token. So its cache lacks nothing.
    The first sample to end, rarely several, takes part in the round that was launched before that was known.
    """
    engine = engines["adaptive"]
    asked = same.requests(12, "some")
    sampling = Sampling(temperature=0.3, max_new_tokens=260, ignore_eos=True)
    computing = Roofline(0.0, token_ms=1 / 32, context_ms=1 / 150, drafter=0.1)
    rule = certain(computing, [OFF, SpecConfig(3)])
    try:
        engine.update_weights(1, same.half_wrong_drafter().items())
        engine.set_config(k(3))
        always = list(engine.generate(asked, sampling))
        engine.set_spec_rule(rule)
        engine.stats()
        sometimes = list(engine.generate(asked, sampling))
        stats = engine.stats()
        report = engine.spec_rule_report()
    finally:
        engine.set_config(k(3))
        engine.update_weights(0, WEIGHTS.items())
    assert texts(always) == texts(sometimes)
    # Rounds of the whole batch: a round of a trial counts the drafts of 3 requests only.
    [whole] = [s for s in stats if (s.config, s.batch) == (SpecConfig(3), len(asked))]
    uncounted = whole.rounds * len(asked) - sum(whole.accepted)
    assert report["probes"] > 1 and 9 <= uncounted <= 9 * report["probes"] + 3
    both = [
        (before[start], after[start])
        for before, after in zip(map(same.rounds_of, always), map(same.rounds_of, sometimes), strict=True)
        for start in set(before) & set(after)
    ]
    assert all(a == b for a, b in both), [pair for pair in both if pair[0] != pair[1]]
    assert len(both) > 50 and 10 < sum(a > 0 for a, _ in both) < len(both)


def drafting_or_off(engine: SGLangEngine, turns: Callable[[int, SpecConfig], Turns]) -> tuple[Turns, Turns]:
    """Call `turns` with drafts in every round, and with rounds that are off. The engine is as before then."""
    try:
        return turns(80, k(3)), turns(81, OFF)
    finally:
        engine.set_config(k(3))
        engine.update_weights(0, WEIGHTS.items())


def test_a_later_turn_finds_no_hole_in_the_drafters_cache(engines: Engines) -> None:
    """Turn 1 runs without drafts. Turn 2 takes its prefix from SGLang's tree, and drafts as if never off."""
    engine = engines["adaptive"]
    sampling = Sampling(temperature=0.3, max_new_tokens=100, ignore_eos=True)

    def turns(version: int, first: SpecConfig) -> list[list[Sample]]:
        engine.update_weights(version, same.half_wrong_drafter().items())  # empties the tree
        engine.set_config(first)
        done = [list(engine.generate(same.requests(6, f"one-{version}"), sampling))]
        engine.set_config(k(3))
        prompts = [Prompt(i, np.concatenate([s.tokens, [5, 6, 7]])) for i, s in enumerate(done[0])]
        later = [Request(f"two-{version}-{i:03d}.", prompt, seed=2000 + i) for i, prompt in enumerate(prompts)]
        return [*done, list(engine.generate(later, sampling))]

    always, again = drafting_or_off(engine, turns)
    assert [texts(turn) for turn in always] == [texts(turn) for turn in again]
    assert [s.accepted for s in again[1]] == [s.accepted for s in always[1]]
    assert any(sum(s.accepted[1:]) > 10 for s in always[1])


def test_rounds_of_finished_requests_do_not_count(engines: Engines) -> None:
    """A request that ends at a stop token takes part in the round that was launched before that was known."""
    engine = engines["adaptive"]
    stopping = Sampling(temperature=1.0, max_new_tokens=60, stop_token_ids=tuple(range(3, 12)))
    for config in (k(2), OFF):
        engine.set_config(config)
        engine.stats()
        samples = engine.generate(same.requests(12, "ends"), stopping)
        assert len({len(s.response) for s in samples}) > 4
        width = config.num_steps + 1
        by_round = np.zeros(width)
        by_sample = np.zeros(width)
        for s in engine.stats():
            by_round[: len(s.accepted)] += s.accepted
        for sample in samples:
            by_sample[: len(sample.accepted)] += sample.accepted
        cut = by_round @ np.arange(width) - by_sample @ np.arange(width)  # drafts of a last round, past the end
        assert by_round.sum() == by_sample.sum() and 0 <= cut <= config.num_steps * len(samples)


def test_a_request_that_ends_while_off_adds_no_unread_tokens_to_the_prefix_tree(engines: Engines) -> None:
    """A request ends in a round without drafts; the next round, launched before, drafts for the others.

    Its drafter never reads what it generated, so no later turn may find that in the tree.
    """
    engine = engines["adaptive"]
    beside = Request("beside.", Prompt(0, np.arange(10, 30)), seed=5)
    ending = Request("ending.", Prompt(1, np.arange(40, 60)), seed=6)

    def turns(version: int, together: SpecConfig) -> Sample:
        engine.update_weights(version, same.half_wrong_drafter().items())  # empties the tree
        engine.set_config(SpecConfig(3))
        sampling = Sampling(temperature=0.3, max_new_tokens=400, ignore_eos=True)
        end = same.started(engine, [beside], sampling, least=5)
        with taking_turns(engine, together, SpecConfig(3)):
            [first] = engine.generate([ending], Sampling(temperature=0.3, max_new_tokens=60, ignore_eos=True))
        assert engine.progress().running
        engine.abort()
        end()
        later = Request("later.", Prompt(2, np.concatenate([first.tokens, [5, 6, 7]])), seed=7)
        engine.set_config(k(3))
        [second] = engine.generate([later], Sampling(temperature=0.3, max_new_tokens=100, ignore_eos=True))
        return second

    always, again = drafting_or_off(engine, turns)
    assert texts([always]) == texts([again])
    assert always.accepted == again.accepted and sum(always.accepted[1:]) > 10


def test_prompts_enter_the_prefix_tree_while_off(engines: Engines) -> None:
    """The drafter reads every prompt, so a second sample of the same prompt reuses it."""
    engine = engines["adaptive"]
    engine.set_config(OFF)
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": list(range(20, 60)), "sampling_params": sampling}
    headers = {"Authorization": f"Bearer {KEY}"}
    cached = []
    for _ in range(2):
        answer = requests.post(f"{engine.url}/generate", json=body, headers=headers, timeout=30)
        cached.append(answer.json()["meta_info"]["cached_tokens"])
    assert cached[0] == 0 and cached[1] >= 38


def test_each_token_is_drawn_under_the_weights_that_its_span_names(engines: Engines) -> None:
    """A push comes while rounds are in flight. The tokens after it must be those of the new weights."""
    engine = engines["adaptive"]
    other = {name: tensor * 1.1 for name, tensor in WEIGHTS.items()}
    sampling = Sampling(max_new_tokens=300, ignore_eos=True)
    asked = same.requests(4, "span")
    engine.update_weights(0, WEIGHTS.items())  # other tests leave the same weights under other versions
    engine.set_config(k(3))
    before = engine.generate(asked, sampling)
    end_of = same.started(engine, asked, sampling, least=5)
    try:
        engine.update_weights(8, other.items())
        for old, sample in zip(before, end_of(), strict=True):
            (first_version, _, cut), (second_version, _, end) = sample.policy_versions
            assert (first_version, second_version, end) == (0, 8, 300) and 0 < cut < 300
            assert sample.response[:cut].tolist() == old.response[:cut].tolist()
            start = sample.prompt_len + cut
            rest = Request("rest.", Prompt(0, sample.tokens[:start]), seed=sampling_seed(asked, sample))
            [alone] = engine.generate([rest], Sampling(max_new_tokens=300 - cut, ignore_eos=True))
            assert alone.response.tolist() == sample.tokens[start:].tolist()
            np.testing.assert_allclose(alone.behaviour_logprobs[start:], sample.behaviour_logprobs[start:], atol=2e-4)
    finally:
        engine.update_weights(0, WEIGHTS.items())


def sampling_seed(asked: list[Request], sample: Sample) -> int:
    return next(request.seed for request in asked if request.id == sample.request_id)


@pytest.mark.lossless
@pytest.mark.parametrize("emulated", EMULATED)
def test_retraction_changes_no_text(plain: SGLangEngine, checkpoint: Path, tmp_path: Path, emulated: str) -> None:
    """Requests lose their cache while their last round is in flight, and are prefilled again."""
    retracting = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    log = tmp_path / "retracting.log"
    asked = same.requests(12, "back")
    sampling = same.SAMPLINGS["T=1"]
    expected = plain.generate(asked, sampling)
    arguments = [*SERVE, *same.LAUNCHES["adaptive"]]
    environment = {emulation.VARIABLE: EMULATED[emulated]} | retracting
    with emulation.launch(checkpoint, log, arguments, environment, KEY) as process:
        engine = SGLangEngine.of(process.wait(), timeout=120)
        for configs in ((k(3),), same.SWITCHING, (OFF,)):
            with taking_turns(engine, *configs):
                samples = engine.generate(asked, sampling)
            assert texts(samples) == texts(expected)
            for one, other in zip(samples, expected, strict=True):
                np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=2e-4)
        assert log.read_text().count("Testing retraction") > 3
