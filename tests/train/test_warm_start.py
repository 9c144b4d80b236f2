"""A warmed-up drafter does not get worse when the next run begins, thanks to the rate's warm-up."""

import numpy as np
from train_ranks import HF_CONFIG, batches, config, on_ranks, use_layout

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


def warmed(steps):
    """Train `steps`; return the weights of policy and drafter."""
    trainer = trainer_of()
    for seed in range(steps):
        step(trainer, seed)
    return dict(trainer.export())


def held_out_loss(trainer):
    """Compute the cross-entropy of depth 1 on texts that are not trained on, without an update."""
    learner = trainer.drafter_learner
    share = batches(texts(9999, 32), trainer.config, budget=2000)
    real, learner.step = learner.step, lambda: (0.0, True)
    try:
        return trainer.train_step(share, objective="sft", train_policy=False)["drafter/ce_1"]
    finally:
        learner.step = real


def continued():
    """Return the held-out loss before and after the drafter's first steps of the next run, for each way to start."""
    weights = warmed(30)
    found = {}
    for name, warmup in {"cold": 0, "warm-up": 20}.items():
        trainer = trainer_of(warmup)
        trainer.load_hf(weights)
        found[name] = [held_out_loss(trainer)]
        for seed in (1000, 1001):
            step(trainer, seed, train_policy=False)
            found[name].append(held_out_loss(trainer))
    return found


def test_the_first_steps_of_the_next_run_do_not_harm_the_drafter():
    (found,) = on_ranks(1, continued)
    for name, losses in found.items():
        print(f"  {name:8}: held-out loss {' '.join(f'{loss:.3f}' for loss in losses)}")
    before = found["cold"][0]
    assert max(found["cold"]) > before + 0.05, "the control: a new Adam at its full rate"
    assert max(found["warm-up"]) < before + 0.005


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
