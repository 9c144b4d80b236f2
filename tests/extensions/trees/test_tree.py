"""Tree budgets against brute force: the maps are monotone and calibrated, the searches find what trying all n finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rlspec.extensions.trees.tree import AcceptanceMap, TreeBudget, VerifyCost
from megatron_rlspec.rollout.embedded import draft
from megatron_rlspec.speculation.acceptance import grow


def forest(rng, samples=6, branching=2, layers=4, spread=1.0):
    """Scores [B, M], parents [M], depth [M] of full trees; a child scores below its parent."""
    parents, depth, scores = [], [], np.zeros((samples, 0))
    level = [-1]
    easy = rng.exponential(spread, (samples, 1))  # some samples are easy to draft for, some are not
    for d in range(1, layers + 1):
        nodes = []
        for parent in level:
            base = 0 if parent < 0 else scores[:, parent]
            for _ in range(branching):
                parents.append(parent)
                depth.append(d)
                nodes.append(len(parents) - 1)
                scores = np.column_stack([scores, base - easy[:, 0] * rng.exponential(1.0, samples)])
        level = nodes
    return scores, np.array(parents), np.array(depth)


def rising(samples, context, verified):
    """ms: flat up to 24 verified tokens, then dearer and dearer."""
    return 5.0 + 0.02 * samples + 1e-4 * context + 0.004 * verified + 0.06 * max(0, verified - 24)


def closed(keep, parents):
    return all(keep[:, p][keep[:, i]].all() for i, p in enumerate(parents) if p >= 0)


@pytest.mark.parametrize(("rates", "topk"), [([0.7, 0.4, 0.3, 0.55], 3), ([0.9, 0.2], 4), ([0.6, 0.5, 0.8], 1)])
def test_trees_grow_as_a_drafter_grows_them(rates, topk):
    """The drafter's probabilities are those of acceptance, so its tree must have the same nodes and scores."""
    grown = grow(rates, topk, 0.37)

    def pick(logits, level):
        missed = (1 - rates[level - 1]) * 0.63 ** np.arange(topk - 1)
        likely = torch.tensor(np.r_[rates[level - 1], np.minimum(rates[level - 1], missed * 0.37)]).log()
        return likely.expand(*logits.shape[:2], topk), torch.zeros((*logits.shape[:2], topk), dtype=torch.long)

    def expand(parents, tokens, ancestors, level):
        return torch.zeros((1, topk, 1)), torch.zeros((1, topk, 9))

    drafted = draft.grow(torch.zeros((1, 1)), torch.zeros((1, 9)), len(rates), topk, expand, pick)
    assert np.array_equal(grown.depth, drafted.depth)
    assert np.exp(drafted.scores[0].numpy()) == pytest.approx(grown.chance)
    likely = np.exp(drafted.scores[0].numpy()) > grown.chance.min() * 1.5  # of equal ones the drafter may take any
    assert np.array_equal(grown.parents[likely], drafted.parents[0].numpy()[likely])


def test_f_is_monotone_calibrated_and_forgets():
    rng = np.random.default_rng(0)
    scores = -rng.exponential(1.5, 40_000)
    truth = 0.8 * np.exp(0.7 * scores)
    f = AcceptanceMap(window=1e9)
    assert f(np.array([0.0, -1.0])) == pytest.approx([1, np.exp(-1)], abs=0.02)  # before any data: the drafter's word
    for part in range(10):
        at = slice(part * 4000, (part + 1) * 4000)
        f.observe(scores[at], rng.random(4000) < truth[at])
    grid = np.linspace(-5, 0, 200)
    assert (np.diff(f(grid)) >= 0).all()
    np.testing.assert_allclose(f(grid), 0.8 * np.exp(0.7 * grid), atol=0.04)
    moved = AcceptanceMap(window=4000)
    for accepted, expected in ((1.0, 1.0), (0.0, 0.0)):
        for _ in range(8):
            moved.observe(scores[:4000], np.full(4000, accepted))
        assert moved(np.array([-1.0]))[0] == pytest.approx(expected, abs=0.03)


def test_the_fit_of_f_pools_decreasing_bins():
    f, at = AcceptanceMap(bins=4, lowest=-4.0, prior=1e-9), [-3.0, -2.0, -0.5, -0.1]
    f.observe(np.repeat(at, 10), np.repeat([0.1, 0.6, 0.2, 0.9], 10))
    np.testing.assert_allclose(f(np.array(at)), [0.1, 0.4, 0.4, 0.9], atol=1e-6)


def test_cost_fits_a_knee_and_caches_by_bucket():
    rng = np.random.default_rng(1)
    rounds = []
    ms = lambda samples, context, verified: rising(samples, context, verified / 10)  # noqa: E731  a knee at 240
    for _ in range(200):
        samples, context, n = rng.integers(1, 65), rng.integers(100, 20_000), rng.integers(1, 17)
        noise = rng.normal(1, 0.02)
        rounds.append((samples, context, samples * n, ms(samples, context, samples * n) * noise))
    cost = VerifyCost.fit(rounds)
    for samples, context, verified in ((8, 2048, 16), (32, 4096, 128), (64, 16384, 512)):
        assert cost(samples, context, verified) == pytest.approx(ms(samples, context, verified), rel=0.1)
    assert cost(8, 2000, 65) == cost(8, 1900, 80) and len(cost._known) == 4
    at = [16, 64, 128, 256, 512, 1024]
    slopes = np.diff([cost(16, 1024, v) for v in at]) / np.diff(at)
    assert (np.diff(slopes) >= -1e-9).all() and slopes[0] >= 0 and slopes[-1] > 4 * slopes[0]
    with pytest.raises(ValueError, match="at least 4 measured rounds, got 2"):
        VerifyCost.fit(rounds[:2])


@pytest.mark.parametrize("seed", range(8))
def test_one_n_for_all_is_the_best_n(seed):
    """Layer-level search with early stop finds what trying every n finds (the cost here has no buckets)."""
    rng = np.random.default_rng(seed)
    scores, parents, depth = forest(rng, samples=int(rng.integers(1, 9)), spread=rng.uniform(0.1, 1.5))
    budget = TreeBudget(rising)
    keep = budget.keep(scores, depth, 1000, 14)
    counts = keep.sum(1)
    assert closed(keep, parents) and len(set(counts)) == 1
    ranked = -np.sort(-budget.acceptance(scores), axis=1)
    b = len(scores)
    values = [(b + ranked[:, :n].sum()) / rising(b, 1000, b * (n + 1)) for n in range(15)]
    assert counts[0] == int(np.argmax(values))


def test_dear_tokens_stop_the_budget_and_free_ones_do_not():
    scores, _, depth = forest(np.random.default_rng(3))
    asked = []
    dear = TreeBudget(lambda s, c, v: asked.append(v) or 1.0 + 10.0 * v, patience=3)
    assert dear.keep(scores, depth, 10, 30).sum() == 0
    assert len(asked) == 1 + 3  # no further than three in a row that fall
    free = TreeBudget(lambda s, c, v: 1.0)
    assert (free.keep(scores, depth, 10, 7).sum(1) == 7).all()


def test_a_budget_without_a_cost_learns_it_from_its_rounds():
    """It tries every size, then chooses as a budget with the true cost; it follows a changed cost."""
    rng = np.random.default_rng(5)
    learning, told, sizes = TreeBudget(), TreeBudget(rising), []
    for _ in range(60):
        scores, _, depth = forest(rng, samples=int(rng.integers(2, 9)))
        verified = len(scores) + int(learning.keep(scores, depth, 1000, 12).sum())
        if learning.cost is None:
            sizes.append(verified / len(scores) - 1)
        learning.timed(len(scores), 1000, verified, rising(len(scores), 1000, verified) * rng.uniform(0.97, 1.03))
    assert {0.0, 12.0} <= set(sizes) and len(sizes) < 60
    values = []
    for _ in range(20):
        scores, _, depth = forest(rng, samples=6)
        kept = [budget.keep(scores, depth, 1000, 12) for budget in (learning, told)]
        values.append([(6 + np.exp(scores[k]).sum()) / rising(6, 1000, 6 + int(k.sum())) for k in kept])
    ours, best = np.mean(values, 0)
    assert ours > 0.97 * best
    before = learning.cost(6, 1000, 40)
    for _ in range(400):
        verified = int(rng.integers(6, 60))
        learning.timed(6, 1000, verified, 3 * rising(6, 1000, verified))
    assert learning.cost(6, 1000, 40) > 1.8 * before
