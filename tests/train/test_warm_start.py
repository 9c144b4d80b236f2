"""A warmed-up drafter does not get worse when the next run begins, thanks to Adam's moments and rate warm-up."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from train_ranks import HF_CONFIG, batches, config, digest, on_ranks, use_layout

from megatron_rlspec.models import tensor_file
from megatron_rlspec.train import moments
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Prompt, Sample

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 2}
HF = HF_CONFIG | SIZES | {"initializer_range": 0.05}
RATE = 2e-2


def texts(seed, count=4, length=40):
    """Draw texts of a Markov chain: each token is followed by one of two, so that there is something to learn."""
    draw = np.random.default_rng(seed)
    out = []
    for i in range(count):
        tokens = [int(draw.integers(64))]
        while len(tokens) < length:
            tokens.append((5 * tokens[-1] + (1 if draw.random() < 0.9 else 17)) % 64)
        mask = (np.arange(length) >= 4).astype(np.float32)
        out.append(Sample(f"s{i}", Prompt(i, np.array(tokens[:4])), np.array(tokens), mask, mask - 1))
    return out


def trainer_of(warmup=0, **sections):
    defaults = {
        "model": {"dtype": "float32"},
        "optimizer": {"lr": RATE, "clip_grad": 1.0},
        "drafter": {"lr": RATE, "warmup_steps": warmup, "loss": "ce"},
    }
    merged = {key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults | sections}
    options = config(**merged)
    use_layout(options.parallel)
    return Trainer(options, HF)


def step(trainer, seed, **how):
    share = batches(texts(seed), trainer.config, budget=500)
    return trainer.train_step(share, objective="sft", **how)


def warmed(folder, steps):
    """Train `steps`; return the weights of policy and drafter, and the file with the drafter's moments."""
    trainer = trainer_of()
    for seed in range(steps):
        step(trainer, seed)
    save(trainer, folder)
    return dict(trainer.export())


def save(trainer, folder):
    found = dict(trainer.export_drafter_moments())
    if torch.distributed.get_rank() == 0:
        moments.file_of(Path(folder)).parent.mkdir(parents=True, exist_ok=True)
        tensor_file.save(found, moments.file_of(Path(folder)))
    torch.distributed.barrier()


def opened(trainer, folder, weights):
    file, problem = moments.find(Path(folder), trainer.table, {n: tuple(t.shape) for n, t in weights.items()})
    assert not problem and file is not None
    return file


def held_out_loss(trainer):
    """Compute the cross-entropy of depth 1 on texts that are not trained on, without an update."""
    learner = trainer.drafter_learner
    share = batches(texts(9999, 32), trainer.config, budget=2000)
    real, learner.step = learner.step, lambda: (0.0, True)
    try:
        return trainer.train_step(share, objective="sft", train_policy=False)["drafter/ce_1"]
    finally:
        learner.step = real


def continued(folder):
    """Return the held-out loss before and after the drafter's first steps of the next run, for each way to start."""
    weights = warmed(folder, 30)
    found = {}
    for name, warmup in {"cold": 0, "warm-up": 20, "moments": 20}.items():
        trainer = trainer_of(warmup)
        trainer.load_hf(weights)
        if name == "moments":
            trainer.take_drafter_moments(opened(trainer, folder, weights))
        found[name] = [held_out_loss(trainer)]
        for seed in (1000, 1001):
            step(trainer, seed, train_policy=False)
            found[name].append(held_out_loss(trainer))
    return found


def test_the_first_steps_of_the_next_run_do_not_harm_the_drafter(tmp_path):
    (found,) = on_ranks(1, continued, str(tmp_path))
    for name, losses in found.items():
        print(f"  {name:8}: held-out loss {' '.join(f'{loss:.3f}' for loss in losses)}")
    before = found["cold"][0]
    assert max(found["cold"]) > before + 0.05, "the control: Adam without moments at its full rate"
    assert max(found["warm-up"]) < before + 0.005 and max(found["moments"]) < before + 0.005


def moments_of(folder, weights, steps, take_from=None, **sections):
    """Return the moments after `steps` steps; if `take_from` names a folder, after they are written and read back."""
    trainer = trainer_of(**sections)
    trainer.load_hf(weights)
    if take_from:
        trainer.take_drafter_moments(opened(trainer, take_from, weights))
    for seed in range(steps):
        step(trainer, seed)
    save(trainer, folder)


def in_two_layouts(folder, weights):
    """Write moments on tensor-parallel ranks; read and write them again on data-parallel ranks with ZeRO-1."""
    tensor = {"parallel": {"tensor": 2, "sequence": True}, "model": {"dtype": "float64"}}
    moments_of(f"{folder}/tensor", weights, 3, **tensor)
    moments_of(f"{folder}/again", weights, 0, f"{folder}/tensor", **tensor)
    shared = {"optimizer": {"lr": RATE, "distributed": True}}
    moments_of(f"{folder}/zero", weights, 0, f"{folder}/tensor", **shared)
    moments_of(f"{folder}/pipeline", weights, 0, f"{folder}/tensor", parallel={"pipeline": 2})


def on_one_rank(folder, weights):
    moments_of(f"{folder}/single", weights, 3, model={"dtype": "float64"})
    moments_of(f"{folder}/bfloat16", weights, 0, f"{folder}/tensor", model={"dtype": "bfloat16"})


def test_moments_do_not_depend_on_the_layout_of_ranks(tmp_path):
    (weights,) = on_ranks(1, warmed, str(tmp_path), 0)
    on_ranks(2, in_two_layouts, str(tmp_path), weights)
    on_ranks(1, on_one_rank, str(tmp_path), weights)
    found = {
        name: load_file(moments.file_of(tmp_path / name)) for name in ("single", "tensor", "again", "zero", "pipeline")
    }
    found["bfloat16"] = load_file(moments.file_of(tmp_path / "bfloat16"))
    assert int(found["single"]["updates"]) == 3
    for name, tensor in found["single"].items():
        torch.testing.assert_close(found["tensor"][name], tensor, rtol=1e-4, atol=1e-9)
        assert torch.equal(found["again"][name], found["tensor"][name])
        for other in ("zero", "pipeline", "bfloat16"):
            assert torch.equal(found[other][name], found["tensor"][name].to(found[other][name].dtype)), (other, name)


def resumed(folder):
    """Run once from loaded moments, with a save in between; and once resumed from that save."""
    weights = warmed(folder, 2)
    first = trainer_of(20)
    first.load_hf(weights)
    first.take_drafter_moments(opened(first, folder, weights))
    step(first, 1)
    first.save(Path(folder, "saved"))
    second = trainer_of(20)
    second.load_hf(weights)
    second.load(Path(folder, "saved"))
    rates = []
    for trainer in (first, second):
        step(trainer, 2)
        rates.append(trainer.drafter_learner.optimizer.param_groups[0]["lr"])
    return rates, [digest(trainer.drafter.parameters()) for trainer in (first, second)]


def test_a_run_that_loaded_moments_resumes_bit_for_bit(tmp_path):
    ((rates, digests),) = on_ranks(1, resumed, str(tmp_path))
    assert rates == [RATE * 4 / 20] * 2  # two updates before the run, two of its own
    assert digests[0] == digests[1]


def rates_by_pace():
    """Return both learning rates after two steps, in the first of which the drafter had eight updates more."""
    trainer = trainer_of(optimizer={"decay_steps": 10})
    step(trainer, 1)
    for seed in range(2, 10):
        step(trainer, seed, train_policy=False)
    step(trainer, 10)
    return [learner.optimizer.param_groups[0]["lr"] for learner in (trainer.learner, trainer.drafter_learner)]


def test_both_rates_decay_by_steps_however_many_updates_the_drafter_has():
    (found,) = on_ranks(1, rates_by_pace)
    assert found == [RATE * (1 - 0.9 * 2 / 10)] * 2


def damages(folder):
    """Return the messages of `find` for files that do not fit."""
    weights = warmed(folder, 1)
    trainer = trainer_of()
    shapes = {n: tuple(t.shape) for n, t in weights.items()}
    whole = load_file(moments.file_of(Path(folder)))
    name = next(key for key in whole if key.startswith("exp_avg."))
    said = []
    for change in ({name: whole[name][:-1].clone()}, {"updates": torch.zeros(2)}, {name: None}):
        kept = {key: tensor for key, tensor in (whole | change).items() if tensor is not None}
        tensor_file.save(kept, moments.file_of(Path(folder)))
        said.append(moments.find(Path(folder), trainer.table, shapes))
    moments.file_of(Path(folder)).write_bytes(b"no safetensors")
    said.append(moments.find(Path(folder), trainer.table, shapes))
    return said, moments.find(Path(folder, "elsewhere"), trainer.table, shapes)


def test_moments_that_do_not_fit_are_named_in_one_line(tmp_path):
    ((said, absent),) = on_ranks(1, damages, str(tmp_path))
    assert absent == (None, "")
    for (file, problem), expected in zip(
        said, ("has shape", "scalar `updates`", "it has no exp_avg.", "not safetensors"), strict=True
    ):
        assert file is None and expected in problem and "starts without moments" in problem and "\n" not in problem
