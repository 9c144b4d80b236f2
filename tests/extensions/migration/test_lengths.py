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
def test_survival_and_remaining_follow_the_product_limit(rows, length, cap):
    lengths = seen(rows)
    base = product_limit(rows, length)
    longest = max(length for length, _ in rows)
    if length > longest or base == 0:
        return
    more = np.arange(0, 50)
    expected = [product_limit(rows, min(length + m, longest)) / base for m in more]
    assert np.allclose(lengths.survival(length, more), expected)
    total = sum(product_limit(rows, min(u, longest)) / base for u in range(length, cap))
    assert lengths.remaining(length, cap) == pytest.approx(total)


def test_a_textbook_table():
    """The 6-MP arm of Freireich et al. (1963), as in Kalbfleisch and Prentice: S(6) = 0.857, S(13) = 0.690."""
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    cut = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    lengths = Lengths()
    lengths.observe(ended + cut, [False] * len(ended) + [True] * len(cut))
    assert lengths.survival(0, np.array([6, 13, 23])) == pytest.approx([0.857, 0.690, 0.448], abs=5e-4)


def test_the_cap_censors():
    """Samples that ended at the cap of a shorter run do not say that responses are so short."""
    naive, right = Lengths(), Lengths()
    naive.observe([10] * 5 + [20] * 5, [False] * 10)
    right.observe([10] * 5 + [20] * 5, [False] * 5 + [True] * 5)
    assert naive.remaining(0, 100) == pytest.approx(15)
    assert right.remaining(0, 100) == pytest.approx(55)


def test_running_samples_count_as_censored():
    lengths = Lengths()
    lengths.observe([4, 5, 6], [False] * 3)
    assert lengths.remaining(0, 100) == pytest.approx(5)
    assert lengths.beside([50] * 3).remaining(0, 100) == pytest.approx(52.5)
    assert lengths.remaining(0, 100) == pytest.approx(5)


def test_without_samples_all_run_to_the_cap():
    assert Lengths().remaining(30, 100) == 70
    assert Lengths().remaining(100, 100) == 0


def test_beyond_the_longest_sample_the_expectation_grows_with_the_length():
    lengths = seen([(10, False)])
    found = [lengths.remaining(n, 1000) for n in (10, 20, 40, 80)]
    assert found == sorted(found)
    assert 10 < found[0] < 100
