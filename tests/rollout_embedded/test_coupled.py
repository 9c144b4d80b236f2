"""Drafts with the verifier's own noise: how many are accepted, by formula and in the engine, under the same text."""

from __future__ import annotations

import embedded_oracle as oracle
import numpy as np
import pytest
import torch

from megatron_rlspec import noise
from megatron_rlspec.config import load
from megatron_rlspec.engine import EngineError
from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.models.config import CheckpointError, sharpness_of
from megatron_rlspec.noise import draw, uniform
from megatron_rlspec.rollout.embedded import draft, verify
from megatron_rlspec.run.engines import RunDraftRule
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SHARPNESS, Prompt, Request, Sampling, SpecConfig

torch.set_num_threads(1)
DRAWS = 10_000


def acceptance(p, q) -> float:
    """P(argmax(log p + g) = argmax(log q + g)) for one Gumbel noise g: the sum over the token x of both."""
    total = 0.0
    for x in np.flatnonzero((p > 0) & (q > 0)):
        total += 1 / np.maximum(p / p[x], q / q[x]).sum()
    return total


PAIRS = 10  # of (p, q) for each filter and sharpness: 50 with s = 1
FILTERS = {"whole": (1.0, -1, 0.0), "all": (0.9, 8, 0.05)}


def test_the_noise_keeps_the_tensors_that_cuda_graphs_read():
    first = noise._columns(3, torch.device("cpu"))
    for width in range(10, 20):
        noise._columns(width, torch.device("cpu"))
    assert noise._columns(3, torch.device("cpu")) is first


@pytest.mark.parametrize(("name", "sharpness"), [("whole", 1.0), ("all", 1.0), ("all", 2.0)])
def test_acceptance_equals_the_formula(name, sharpness):
    """At temperatures from 0.3 to 2, for drafters from close to poor; other pairs in every case."""
    g = torch.Generator().manual_seed(10 * list(FILTERS).index(name) + int(sharpness))
    keys = torch.arange(DRAWS)
    for pair, temperature in enumerate(np.linspace(0.3, 2, PAIRS)):
        logits = 2 * torch.randn(2, 40, generator=g, dtype=torch.float64)
        distance = 0.2 * (1 + 7 * pair % PAIRS)
        logits[1] = logits[0] + distance * torch.randn(40, generator=g, dtype=torch.float64)
        settings = verify.Settings(*(torch.tensor([x]).expand(DRAWS) for x in (float(temperature), *FILTERS[name])))
        of_two = verify.Settings(*(x[:2] for x in settings))
        logp = verify.filtered(verify.logprobs(logits, of_two.temperature), of_two)
        logp = (logp * torch.tensor([[1.0], [sharpness]])).log_softmax(-1)
        seeds = torch.full((DRAWS,), 977 * pair + 5)
        token = draw(logp[0].expand(DRAWS, -1), seeds, keys)
        drafter = logits[1].expand(DRAWS, -1)
        _, proposed = draft.coupled(drafter, settings, seeds, keys, sharpness=sharpness)
        seen = (token == proposed).double().mean().item()
        p, q = logp.exp().numpy()
        expected = acceptance(p, q)
        assert abs(seen - expected) < 4.5 * (expected * (1 - expected) / DRAWS) ** 0.5 + 1e-9
        variation = 0.5 * np.abs(p - q).sum()
        assert expected >= (1 - variation) / (1 + variation) - 1e-12


def test_every_request_drafts_with_its_own_temperature_and_filters():
    g = torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(5, 40, generator=g, dtype=torch.float64)
    settings = verify.Settings(
        temperature=torch.tensor([0.0, 2.0, 3.0, 2.0, 2.5]),
        top_p=torch.tensor([1.0, 0.3, 1.0, 1.0, 1.0]),
        top_k=torch.tensor([-1, -1, 3, -1, -1]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.6, 0.0]),
    )
    seeds, keys = torch.arange(5) * 977, torch.tensor([7, 7, 30, 2, 9])
    _, together = draft.coupled(logits, settings, seeds, keys, sharpness=1.0)
    for i in range(5):
        row = slice(i, i + 1)
        own = verify.Settings(*(x[row] for x in settings))
        _, alone = draft.coupled(logits[row], own, seeds[row], keys[row], sharpness=1.0)
        assert alone.tolist() == together[row].tolist()
    assert together[0] == logits[0].argmax()
    assert (together[1:] != logits[1:].argmax(-1)).any()


@pytest.fixture(scope="module")
def model():
    config, tensors = oracle.tiny(vocab=48, hidden=32, drafter="close", sharpness=1.0, seed=9)
    g = torch.Generator().manual_seed(1)
    worse = 1 + 0.3 * torch.randn(32, generator=g, dtype=torch.float64)
    tensors["model.mtp_layers.0.final_layernorm.weight"] *= worse
    return config, tensors


CHAIN = SpecConfig(3)


def rounds(model, sampling, sharpness=None, **options):
    """Return the texts of 48 samples, and the tokens that a round of the verifier commits on average."""
    rng = np.random.default_rng(4)
    requests = [Request(f"{i}.", Prompt(i, rng.integers(1, 48, 8)), int(rng.integers(2**40))) for i in range(48)]
    engine = oracle.engine_of(*model, CHAIN, max_total_tokens=16384, max_running_requests=64, **options)
    if sharpness is not None:
        engine.set_config(CHAIN, sharpness)
    texts = [sample.response.tolist() for sample in engine.generate(requests, sampling)]
    counts = np.zeros(8)
    for stat in engine.stats():
        counts[: len(stat.accepted)] += stat.accepted
    return texts, 1 + (counts * np.arange(8)).sum() / counts.sum()


PLAIN = Sampling(max_new_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("sampling", "gain"),
    [
        (PLAIN, 0.8),
        (Sampling(max_new_tokens=40, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, ignore_eos=True), 0.3),
        (Sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True), 0.0),
    ],
    ids=["plain", "filtered", "greedy"],
)
def test_coupled_drafts_are_accepted_more_often_and_change_no_text(model, sampling, gain):
    """By at least `gain` tokens a round from this drafter, which is close; greedy drafts are the same ones."""
    plain = rounds(model, sampling, drafts="argmax")
    coupled = rounds(model, sampling, sharpness=1.0)
    assert coupled[0] == plain[0]
    assert coupled[1] == plain[1] if gain == 0.0 else coupled[1] > plain[1] + gain


def test_an_engine_drafts_with_the_sharpness_that_config_json_states_until_a_rule_names_one(model):
    config, tensors = model
    for stated in (None, 1.5):
        engine = oracle.engine_of(config | {"rlspec_sharpness": stated}, tensors, CHAIN)
        for given, expected in ((None, stated or SHARPNESS[0]), (1.0, 1.0), (None, 1.0)):
            engine.set_config(CHAIN, given)
            assert engine.describe()["sharpness"] == expected
        with pytest.raises(EngineError, match=r"sharpness=0; expected a number above 0"):
            engine.set_config(CHAIN, 0)


@pytest.mark.parametrize("stated", ["2", -1, float("nan")])
def test_a_sharpness_that_is_none_is_refused(stated):
    with pytest.raises(CheckpointError, match=r"rlspec_sharpness=.*expected a number above 0"):
        sharpness_of({"rlspec_sharpness": stated})


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_a_run_tells_its_engines_the_sharpness_that_the_trainer_predicts(model, mode):
    learning = Learning((0, 1, 5), Roofline.of_layers(2), adaptive=mode == "adaptive")
    told = RunDraftRule(load(None, {"spec.mode": mode}), learning)
    engine = oracle.engine_of(*model, CHAIN)
    accepted = [1.0, 2.0, 3.0]  # of ten drafts, by sharpness
    for best in (SHARPNESS[2], SHARPNESS[0]):
        learning.expect(Prediction.of_sums((1,), [10.0] * 3, accepted))
        told.set(engine)
        assert engine.describe()["sharpness"] == best
        accepted.reverse()


@pytest.mark.parametrize("words", [None, torch.tensor([3, 5, 8, 9, 17, 30])], ids=["all words", "6 of 40 words"])
def test_training_knows_which_coupled_drafts_are_the_label(words):
    """`Student` says for every position and sharpness s whether argmax(s · log q + noise) is the token of the text."""
    g = torch.Generator().manual_seed(2)
    n, hidden, vocabulary = 60, 12, 40
    h = torch.randn(n, hidden, generator=g)
    weight = torch.randn(vocabulary, hidden, generator=g)
    labels = torch.randint(vocabulary, (n,), generator=g)
    seeds, keys = torch.randint(2**40, (n,), generator=g), torch.arange(n) * 3
    logits = h @ weight.t() / 0.8
    gumbel = -torch.log(-torch.log(uniform(seeds, keys, vocabulary)))
    if words is not None:
        outside = torch.ones(vocabulary, dtype=torch.bool)
        outside[words] = False
        logits[:, outside] = -torch.inf
    drafts = torch.stack([(s * logits.double() + gumbel).argmax(-1) for s in SHARPNESS], 1)
    assert (drafts[:, 0] != drafts[:, 2]).any()
    labels[::2] = drafts[::2, 0]
    labels[1::4] = drafts[1::4, 2]
    seeds[5::7] = -1
    student = Student(
        h, weight, labels, torch.ones(n), temperature=0.8, chunk=16, keep_rows=True, words=words, noise=(seeds, keys)
    )
    student.learn_labels()
    student.finish()
    expected = (drafts == labels[:, None]) & (seeds >= 0)[:, None]
    assert student.rows["coupled"].tolist() == expected.double().tolist()
