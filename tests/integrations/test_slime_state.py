"""The files that slime's train ranks and its RolloutManager exchange, and the acceptance that slime logs."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rlspec.integrations.slime import state as slime_state
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.ragged import BINS


def test_a_prediction_is_read_for_later_rollouts_only(tmp_path):
    by_logq = np.arange(2 * BINS, dtype=float)
    sums = np.array([[4.0, 0, 0], [3, 2, 1]]), np.array([[2.0, 0, 0], [2, 1, 0]])
    prediction = Prediction.of_sums((1, 3), *sums, by_logq)
    slime_state.write_prediction(tmp_path, 6, prediction)
    read = slime_state.read_prediction(tmp_path, 7)
    assert read.steps == (1, 3) and read.rates(3) == prediction.rates(3)
    assert np.array_equal(read.chances, by_logq.reshape(2, BINS))  # of which engines' chances start
    assert slime_state.read_prediction(tmp_path, 6) is None


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a slime checkout")
def test_slimes_accept_length_counts_delivered_tokens(monkeypatch, tmp_path):
    """The last of three rounds accepted three drafts, of which the sample's end kept one."""
    monkeypatch.syspath_prepend(os.environ["RLSPEC_SLIME"])
    from slime.utils.types import Sample

    from megatron_rlspec.integrations.slime import acceptance, rollout

    info = Sample.SpecInfo()
    counts = {"spec_verify_ct": 3, "completion_tokens": 6, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 9}
    info.add(counts | {"spec_correct_drafts_histogram": [1, 0, 1, 1], "rlspec_drafted": [0, 1, 1, 0, 0, 1]})
    sample = Sample(spec_info=info)
    assert info.histogram == [2, 0, 1] and acceptance.of_samples([sample]) == pytest.approx((6 - 1) / 3)
    seen = []
    learning = SimpleNamespace(state=dict)
    after = SimpleNamespace(after_rollout=lambda urls, delivered: seen.append(delivered) or {}, learning=learning)
    monkeypatch.setattr(rollout, "_speculation", after)
    rollout.after_rollout(SimpleNamespace(rlspec={"folder": tmp_path}), [], rollout.flat([[sample], [[sample]]]))
    assert seen == [pytest.approx((6 - 1) / 3)]
