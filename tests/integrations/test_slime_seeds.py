"""Every sample of slime gets a seed of its own under the position-keyed verifier, and none otherwise."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron_rlspec.integrations.slime.seeds import sampling_seed, seeded


async def told(args, sample, sampling_params, evaluation=False):
    """Take the place of slime's `generate_and_rm`."""
    sampling_params["max_new_tokens"] -= 1  # as slime does
    return sampling_params


@pytest.mark.parametrize(
    ("verifier", "index", "given", "expected"),
    [
        ("position_keyed", 7, {}, {"sampling_seed": sampling_seed(3, 7)}),
        ("position_keyed", 8, {}, {"sampling_seed": sampling_seed(3, 8)}),
        ("position_keyed", 7, {"sampling_seed": 5}, {"sampling_seed": 5}),
        ("position_keyed", None, {}, {}),
        ("target_only", 7, {}, {}),
    ],
)
def test_the_sampling_parameters_of_a_sample(verifier, index, given, expected):
    args = SimpleNamespace(rollout_seed=3, rlspec={"verifier": verifier, "folder": "unused"})
    params = {"temperature": 1.0, "max_new_tokens": 9, **given}
    got = asyncio.run(seeded(told)(args, SimpleNamespace(index=index), sampling_params=params))
    assert got == {"temperature": 1.0, "max_new_tokens": 8, **expected}


def test_evaluations_have_other_seeds_and_their_shared_parameters_stay():
    """slime gives all samples of an evaluation one dictionary."""
    args = SimpleNamespace(rollout_seed=3, rlspec={"verifier": "position_keyed", "folder": "unused"})
    shared = {"max_new_tokens": 9}
    got = [asyncio.run(seeded(told)(args, SimpleNamespace(index=i), shared, evaluation=True)) for i in range(2)]
    assert [params["sampling_seed"] for params in got] == [sampling_seed(3, 0, True), sampling_seed(3, 1, True)]
    assert shared == {"max_new_tokens": 9} and sampling_seed(3, 0, True) != sampling_seed(3, 0)
