"""The Kaplan-Meier estimate of lengths, against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rlspec.extensions.migration.plans.lengths import Lengths

samples = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=30)


def seen(rows) -> Lengths:
    lengths = Lengths()
    lengths.observe([length for length, _ in rows], [cut for _, cut in rows])
    return lengths


def product_limit(rows, u: int) -> float:
    """P(length > u) by the product-limit formula, one factor per distinct length."""
    survival = 1.0
    for t in sorted({length for length, cut in rows if not cut and length <= u}):
        at_risk = sum(length >= t for length, _ in rows)
        survival *= 1 - sum(length == t and not cut for length, cut in rows) / at_risk
    return survival


@given(samples, st.integers(0, 40), st.integers(1, 60))
def test_remaining_follows_the_product_limit(rows, length, cap):
    """The running sample counts as censored at its present length."""
    [remaining] = seen(rows).remaining([length], cap)
    rows = [*rows, (length, True)]
    longest = max(length for length, _ in rows)
    base = product_limit(rows, length)
    assert base > 0
    expected = sum(product_limit(rows, min(u, longest)) / base for u in range(length, cap))
    assert remaining == pytest.approx(expected)


def test_a_textbook_table():
    """The 6-MP arm of Freireich et al. (1963), as in Kalbfleisch and Prentice: S(6) = 0.857, S(13) = 0.690."""
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    cut = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    lengths = Lengths()
    lengths.observe(ended + cut, [False] * len(ended) + [True] * len(cut))
    assert lengths._survival([])[[6, 13, 23]] == pytest.approx([0.857, 0.690, 0.448], abs=5e-4)


def test_running_samples_and_those_at_the_cap_count_as_censored():
    lengths = seen([(4, False), (5, False), (6, False)])
    assert lengths.remaining([0], 100) == pytest.approx([5], abs=1.7)
    assert lengths.remaining([50] * 3, 100) == pytest.approx([50] * 3)
    naive = seen([(10, False)] * 50 + [(20, False)] * 50).remaining([0], 100)
    right = seen([(10, False)] * 50 + [(20, True)] * 50).remaining([0], 100)
    assert naive == pytest.approx([15], rel=0.02) and right == pytest.approx([55], rel=0.02)


def test_without_samples_all_run_to_the_cap():
    assert Lengths().remaining([30, 100], 100).tolist() == [70, 0]
    assert np.array_equal(Lengths().remaining([], 100), [])
