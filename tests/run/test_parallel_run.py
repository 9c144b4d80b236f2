"""`rlspec train` under torchrun learns the same as one rank, in the layouts of ranks that a configuration can name."""

from pathlib import Path

import pytest
from short_run import finish, run, train

from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records

# Text and rewards are those of one rank exactly, in the first step; losses and norms up to rounding.
EXACT = ("rollout/samples", "rollout/reward", "rollout/response_tokens", "drafter/tokens_1", "drafter/tokens_3")
CLOSE = ("policy/loss", "policy/grad_norm", "drafter/objective", "drafter/grad_norm", "policy/entropy")
OPTIONS = {
    "rollout__engine": "embedded",
    "spec__mode": "fixed",
    "train__steps": 2,
    "train__eval_prompts": 1,
    "train__tokens_per_micro_batch": 256,
    "algorithm__kl_coef": 0.1,
}
# ranks, options of [parallel], optimizer.distributed
CELLS = {
    "data": (2, {}, "true"),
    "context": (2, {"context": 2}, "false"),
    "tensor-pipeline": (4, {"tensor": 2, "pipeline": 2}, "false"),
    "pipeline-context": (4, {"pipeline": 2, "context": 2}, "false"),
    "tensor-sequence": (4, {"tensor": 2, "sequence": "true", "recompute": "true"}, "true"),
}


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone")
    run(start, run_dir, **OPTIONS)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_layout_learns_what_one_rank_does(start, alone, tmp_path, cell):
    ranks, layout, distributed = CELLS[cell]
    given = {f"parallel__{key}": value for key, value in layout.items()} | {"optimizer__distributed": distributed}
    finish(train(start, tmp_path, ranks=ranks, **OPTIONS, **given))
    ours, theirs = (read_records(folder / "metrics.jsonl") for folder in (tmp_path, alone))
    assert len(ours) == 2 and [ours[0][name] for name in EXACT] == [theirs[0][name] for name in EXACT]
    for name in CLOSE:
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-3, abs=1e-5), name
    assert (
        ours[1]["policy/kl_loss"] == pytest.approx(theirs[1]["policy/kl_loss"], rel=0.2)
        and ours[1]["policy/kl_loss"] > 0
    )
    ours, theirs, before = (read_hf(folder)[1] for folder in (tmp_path / "hf", alone / "hf", start / "model"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        step = (theirs[name] - before[name]).norm()
        assert (ours[name] - theirs[name]).norm() <= 0.1 * step, name  # Adam turns a rounding of nothing into a sign
