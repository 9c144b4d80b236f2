"""Real slime with a frozen drafter: how far the policy has moved from where the run began, also after a resume."""

from functools import cache

import pytest
import test_slime
import torch
from test_slime import OURS, drafter, policy, run_ranks

pytestmark = test_slime.pytestmark


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """Return what each rank saved of a run with a frozen drafter on so many context-parallel ranks."""
    file = tmp_path_factory.mktemp("frozen") / "frozen.yaml"
    file.write_text("rlspec_train: false\nrlspec_drift_every: 1\nrlspec_candidate_steps: [0, 3]\n")
    return cache(lambda cp: run_ranks("frozen", cp, *OURS, "--custom-config-path", str(file)))


@pytest.mark.parametrize("cp", [1, 2])
def test_drift_is_the_share_of_likeliest_tokens_that_changed(frozen, cp):
    ranks = frozen(cp)
    changed, tokens = [0.0] * 4, 0
    for rank in ranks:
        tokens += len(rank["likeliest"][0])
        for i, ids in enumerate(rank["likeliest"]):
            changed[i] += float((ids != rank["likeliest"][0]).sum())
    assert tokens == 18 and changed[0] == 0 < changed[1]  # the responses of samples 0 and 2
    for rank in ranks:
        assert [step["drift_changed"] for step in rank["steps"]] == pytest.approx([n / tokens for n in changed])
        kl = [step["drift_kl"] for step in rank["steps"]]
        assert kl[0] == 0 < kl[1] < kl[2]
        assert kl[3] == pytest.approx(kl[2], rel=1e-6)  # the third step again, of a run that goes on


@pytest.mark.parametrize("cp", [1, 2])
def test_measuring_changes_no_bit_and_a_frozen_drafter_stays(frozen, cp):
    for rank, bare in zip(frozen(cp), run_ranks("frozen_no_drafter", cp), strict=True):
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, policy(rank["parameters"])[n])]
        own = drafter(rank["parameters"])
        assert own and not [n for n, v in own.items() if not torch.equal(v, rank["resumed"][n])]
        assert all("drafter_tokens_k3" in step and "drafter_aged" in step for step in rank["steps"])
