"""An interrupted run continues with the bits of the uninterrupted one."""

import pytest
import torch
from test_parallel_equality import PLAIN, build, own_batches, state
from train_ranks import digest, on_ranks

CELLS = [{"dtype": "float32", "clip": 0.3}, {"dtype": "float32", "tensor": 2, "sequence": True, "distributed": True}]
MORE = [{"dtype": "bfloat16", "distributed": True}, {"dtype": "float32", "pipeline": 2, "tied": True}]


def drafter_bits(trainer):
    return digest(trainer.drafter.parameters()) if trainer.drafter else None


def run(trainer, seeds):
    return [trainer.train_step(own_batches(trainer, seed), objective="grpo") for seed in seeds]


def interrupted(cells, directory):
    out = []
    for index, cell in enumerate(cells):
        cell, clip = PLAIN | cell, cell.get("clip", 0.0)
        trainer = build(cell, clip=clip)
        run(trainer, [0, 1])
        trainer.save(directory / str(index))
        expected = run(trainer, [2, 3]), state(trainer), drafter_bits(trainer)
        fresh = build(cell, clip=clip)
        run(fresh, [5])  # so that nothing is as it was at the start
        fresh.load(directory / str(index))
        out.append((expected, (run(fresh, [2, 3]), state(fresh), drafter_bits(fresh))))
    return out


@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_resume_is_bit_exact(tmp_path, cells):
    for rank in on_ranks(2, interrupted, cells, tmp_path):
        for cell, (expected, resumed) in zip(cells, rank, strict=True):
            assert expected == resumed, cell
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def lifecycle(directory):
    trainer = build(PLAIN | {"dtype": "float32"})
    trainer.save(directory)  # before the first step there are no moments
    first = run(trainer, [0]), state(trainer), drafter_bits(trainer)
    trainer.load(directory)
    assert (run(trainer, [0]), state(trainer), drafter_bits(trainer)) == first  # also the count of updates is 0 again
    trainer.save(directory)  # replaces
    later = run(trainer, [1])
    trainer.load(directory)
    assert run(trainer, [1]) == later
    errors = []
    for other in ({"dtype": "float64"}, {"distributed": True}):
        with pytest.raises(ValueError) as caught:
            build(PLAIN | {"dtype": "float32"} | other).load(directory)
        errors.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        trainer.load(directory / "nothing")
    return [*errors, str(caught.value)]


def test_save_replaces_and_load_refuses_other_layouts(tmp_path):
    ((dtype, distributed, nothing),) = on_ranks(1, lifecycle, tmp_path / "step")
    assert "dtype=float32, but this run has float64" in dtype
    assert "distributed=False, but this run has True" in distributed
    assert "no checkpoint" in nothing


def bfloat16_learns():
    trainer = build(PLAIN | {"dtype": "bfloat16"}, clip=1.0)
    data = own_batches(trainer)
    losses = [trainer.train_step(data, objective="sft") for _ in range(15)]
    assert all(p.dtype == torch.bfloat16 for p in trainer.policy.parameters())
    return losses[0], losses[-1]


def test_bfloat16_learns():
    ((first, last),) = on_ranks(1, bfloat16_learns)
    assert last["policy/loss"] < 0.5 * first["policy/loss"]
    assert last["drafter/loss_1"] < 0.8 * first["drafter/loss_1"]
