"""Names that people type who come from TRL, verl, slime or SkyRL."""

import pytest

from megatron_rlspec.config import options
from megatron_rlspec.config.load import unknown_option
from megatron_rlspec.config.other_names import OPTIONS, SENTENCES

OURS = {option.name for option in options()}
TYPED = {
    "max-steps": "train.steps",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "placement.tensor",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallel.tensor",
    "sglang-mem-fraction-static": "rollout.engine_options",
}


def test_every_name_is_answered_once_by_an_option_or_a_sentence():
    names = [name for others in (OPTIONS | SENTENCES).values() for name in others]
    assert len(names) == len(set(names)) and len(names) > 250
    assert not {option for ours in OPTIONS for option in ours.split(", ")} - OURS
    for name in names:
        assert "did you mean" not in unknown_option(name)
        assert name.replace("-", "_") not in OURS


@pytest.mark.parametrize("typed", TYPED)
def test_the_longest_end_of_a_name_decides(typed):
    assert unknown_option(typed).endswith(f"; here: {TYPED[typed]}")
