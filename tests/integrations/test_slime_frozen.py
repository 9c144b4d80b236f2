"""Real slime with a frozen drafter: how far the policy has moved from where the run began, also after a resume."""

from functools import cache

import pytest
import test_slime
import torch
from small_eagle3 import write_drafter
from test_slime import OURS, drafter, policy, run_ranks
from test_slime_experts import MOE, SPLIT

pytestmark = [*test_slime.pytestmark, pytest.mark.timeout(900)]
ONE_REPLICA = "--rollout-batch-size 2 --global-batch-size 4"
TENSOR = f"--tensor-model-parallel-size 2 {ONE_REPLICA}"
STAGES = f"--pipeline-model-parallel-size 2 {ONE_REPLICA}"
# Name: (context-parallel ranks, replicas or other ranks, options)
LAYOUTS = {
    "one": (1, 1, ""),
    "context": (2, 1, ""),
    "tensor": (1, 2, TENSOR),
    "stages": (1, 2, STAGES),
    "experts": (1, 2, f"{MOE} {SPLIT}"),
    "eagle3": (1, 1, ""),
    "eagle3_tensor": (1, 2, f"{TENSOR} --sequence-parallel"),
}
everywhere = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """Return what each rank saved of a run with a frozen drafter in this layout."""
    room = tmp_path_factory.mktemp("frozen")

    @cache
    def ranks(layout):
        cp, replicas, options = LAYOUTS[layout]
        file = room / f"{layout}.yaml"
        file.write_text("rlspec_train: false\nrlspec_drift_every: 1\nrlspec_candidate_steps: [0, 3]\n")
        if beside(layout):
            file.write_text(f"{file.read_text()}rlspec_kind: eagle3\nrlspec_path: {write_drafter(room / layout)}\n")
        mode = "frozen_beside" if beside(layout) else "frozen"
        return run_ranks(mode, cp, *OURS, "--custom-config-path", str(file), *options.split(), replicas=replicas)

    return ranks


def beside(layout):
    return layout.startswith("eagle3")


@everywhere
def test_drift_is_the_share_of_likeliest_tokens_that_changed(frozen, layout):
    ranks = frozen(layout)
    last = [rank for rank in ranks if len(rank["likeliest"][0])]
    assert len(last) == len(ranks) - (layout == "stages")
    changed, tokens = [0.0] * 4, 0
    for rank in last[:1] if "tensor" in layout else last:  # ranks of a tensor have the same tokens
        tokens += len(rank["likeliest"][0])
        for i, ids in enumerate(rank["likeliest"]):
            changed[i] += float((ids != rank["likeliest"][0]).sum())
    assert tokens == 18 * (2 if layout == "experts" else 1)  # the responses of samples 0 and 2; two replicas
    assert changed[0] == 0 < changed[2]
    for rank in last:
        assert [step["drift_changed"] for step in rank["steps"]] == pytest.approx([n / tokens for n in changed])
        kl = [step["drift_kl"] for step in rank["steps"]]
        assert kl[0] == 0 < kl[1] < kl[2]
        assert kl[3] == pytest.approx(kl[2], rel=1e-6)  # the third step again, of a run that goes on


@everywhere
def test_measuring_changes_no_bit_and_a_frozen_drafter_stays(frozen, layout):
    cp, replicas, options = LAYOUTS[layout]
    without = run_ranks("frozen_no_drafter", cp, *options.split(), replicas=replicas)
    for bare, rank in zip(without, frozen(layout), strict=True):
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, policy(rank["parameters"])[n])]
        own = drafter(rank["parameters"])
        assert bool(own) != (beside(layout) or not len(rank["likeliest"][0]))
        assert not [n for n, v in own.items() if not torch.equal(v, rank["resumed"][n])]
        if len(rank["likeliest"][0]):
            assert all("drafter_tokens_k3" in step and "drafter_aged" in step for step in rank["steps"])
