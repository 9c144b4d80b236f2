"""Real slime with a frozen drafter, which stays as it is, also after a resume."""

import json

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
    "context": (2, 1, ""),
    "stages": (1, 2, STAGES),
    "experts": (1, 2, f"{MOE} {SPLIT}"),
    "eagle3_tensor": (1, 2, f"{TENSOR} --sequence-parallel"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_drafter_stays_and_changes_no_bit_of_the_policy(layout, tmp_path):
    cp, replicas, options = LAYOUTS[layout]
    beside = layout.startswith("eagle3")
    file = tmp_path / "run.yaml"
    settings = {"train": False}
    if beside:
        settings |= {"kind": "eagle3", "path": str(write_drafter(tmp_path / layout))}
    file.write_text(json.dumps({"rlspec": {"drafter": settings, "candidate_steps": [0, 3]}}))
    given = (*OURS, "--custom-config-path", str(file), *options.split())
    ranks = run_ranks("frozen_beside" if beside else "frozen", cp, *given, replicas=replicas)
    without = run_ranks("frozen_no_drafter", cp, *options.split(), replicas=replicas)
    last = ["drafter_tokens_k3" in rank["steps"][0] for rank in ranks]  # on the last pipeline stage
    assert sum(last) == len(ranks) - (layout == "stages")
    for bare, rank, measures in zip(without, ranks, last, strict=True):
        assert not [n for n, v in bare["parameters"].items() if not torch.equal(v, policy(rank["parameters"])[n])]
        own = drafter(rank["parameters"])
        assert bool(own) == (measures and not beside)
        assert not [n for n, v in own.items() if not torch.equal(v, rank["resumed"][n])]
        assert all(("drafter_tokens_k3" in step) == measures for step in rank["steps"])
