"""The files that slime's train ranks and its RolloutManager exchange."""

from types import SimpleNamespace

import numpy as np

from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.speculation.forecast import Prediction


def test_a_prediction_is_read_for_later_rollouts_only(tmp_path):
    prediction = Prediction((1, 3), np.array([[4.0, 0, 0], [3, 2, 1]]), np.array([[2.0, 0, 0], [2, 1, 0]]))
    slime_state.write_prediction(tmp_path, 6, prediction)
    read = slime_state.read_prediction(tmp_path, 7)
    assert read.steps == (1, 3) and read.rates(3) == prediction.rates(3)
    assert slime_state.read_prediction(tmp_path, 6) is None


def test_the_learnt_state_is_saved_and_restored(tmp_path):
    run = tmp_path / "run"
    saved = tmp_path / "iter_0000001/rlspec-drafter"
    slime_state.write_rollouts(run, {"learnt": 1})
    slime_state.hand_on(run, saved)
    slime_state.write_rollouts(run, {"learnt": 2})
    slime_state.hand_on(saved, run)
    assert slime_state.read_rollouts(run) == {"learnt": 1}
    slime_state.hand_on(None, run)  # a run that begins anew, in the folder of an older one
    assert slime_state.read_rollouts(run) is None


def test_runs_without_a_folder_write_nothing():
    assert slime_state.folder(SimpleNamespace()) is None
    slime_state.write_rollouts(None, {})
    slime_state.hand_on(None, None)
    assert slime_state.read_rollouts(None) is None
