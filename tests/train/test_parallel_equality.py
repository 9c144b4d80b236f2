"""The same step gives the same losses and gradients in every layout, and the drafter never changes the policy.

Cells run several to a job of four ranks; the reference of each is one rank with the same weights and samples.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state as ps
from train_ranks import HF_CONFIG, batches, config, digest, moments, on_ranks, samples, use_layout

from megatron_rlspec.train.step import Trainer

# Every dimension of a cell; the first value is the plain one.
DIMENSIONS = {
    "tied": (False, True),
    "unrolling": (3, 1, 2),
    "context": (1, 2),
    "tensor": (1, 2),
    "pipeline": (1, 2),
    "sequence": (False, True),
    "recompute": (False, True),
    "distributed": (False, True),
    "loss": ("ce", "forward_kl"),
    "ratio": ("token", "sequence"),
    "objective": ("grpo", "sft"),
    "some": (False, True),
}
MODEL = ("tied", "unrolling", "loss", "ratio", "objective", "some", "dtype")  # what the numbers may depend on
# dtype -> relative error allowed of the first step's losses, of later ones, of the largest gradient element
TOLERANCE = {"float64": (1e-12, 1e-9, 1e-10), "float32": (5e-6, 2e-3, 2e-4)}


def possible(cell):
    return cell["context"] * cell["tensor"] * cell["pipeline"] <= 4 and (cell["tensor"] > 1 or not cell["sequence"])


def pairwise():
    """Choose cells so that every possible pair of values of two dimensions occurs."""
    names, every = (
        list(DIMENSIONS),
        [dict(zip(DIMENSIONS, v, strict=True)) for v in itertools.product(*DIMENSIONS.values())],
    )
    every = [cell for cell in every if possible(cell)]

    def pairs(cell):
        return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations(names, 2)}

    chosen = []
    left = set().union(*map(pairs, every))
    while left:
        best = max(every, key=lambda cell: len(pairs(cell) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


PLAIN = {key: values[0] for key, values in DIMENSIONS.items()}


def single(cell):
    """Return the same cell on one rank, with every option off that must not change the result."""
    return PLAIN | {key: cell[key] for key in MODEL}


def build(cell, weights=None, *, drafter=True, clip=0.0):
    """Build a trainer of this layout in the running job."""
    options = config(
        model={"dtype": cell["dtype"]},
        parallel={key: cell[key] for key in ("tensor", "pipeline", "context", "sequence", "recompute")},
        optimizer={"distributed": cell["distributed"], "offload": cell.get("offload", False), "clip_grad": clip},
        drafter={"train": drafter, "depth": cell["unrolling"], "loss": cell["loss"]},
        algorithm={"ratio": cell["ratio"], "entropy_coef": 0.01},
        train={"deterministic": cell.get("deterministic", False)},
    )
    use_layout(options.parallel)
    trainer = Trainer(options, HF_CONFIG | {"tie_word_embeddings": cell["tied"]})
    if weights is not None:
        trainer.load_hf(weights)
    return trainer


def own_batches(trainer, seed=0, budget=120, made=None, some=False):
    """Return this rank's micro-batches of `made`, or of 11 short samples; the drafter learns from `some` of them."""
    return batches(made or samples(11, seed), trainer.config, budget=budget, some=some)


def make_weights(cells):
    """Make weights of each model, random in every tensor."""
    out = {}
    for tied in {cell["tied"] for cell in cells}:
        trainer = build(PLAIN | {"dtype": "float64", "tied": tied})
        generator = torch.Generator().manual_seed(3)
        noise = ((k, v + 0.1 * torch.randn(v.shape, generator=generator, dtype=v.dtype)) for k, v in trainer.export())
        out[tied] = dict(noise)
    return out


def measure(cell, weights):
    """Measure everything that is compared between layouts."""
    weights = weights[cell["tied"]]
    trainer = build(cell, weights)
    exported = dict(trainer.export())
    total = sum(x.sum(dtype=torch.float64) for x in trainer.logprobs(own_batches(trainer))).to(trainer.device)
    torch.distributed.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))
    result = {
        "same": all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in exported.items()),
        "exported": len(exported),
        "logprobs": float(total),
    }
    kept = keep_gradients(trainer)
    given = [own_batches(trainer, seed, some=cell["some"]) for seed in (0, 1)]
    result["steps"] = [trainer.train_step(batches, objective=cell["objective"]) for batches in given]
    result["policy"] = state(trainer)
    if not cell["distributed"]:  # there, a rank's buffer holds the sum of its own share only
        for parameter, gradient in kept.items():
            parameter.data = gradient  # so they travel to Hugging Face names as weights do
        result["gradients"] = dict(trainer.export())
    alone = build(cell, weights, drafter=False)
    for seed in (0, 1):
        alone.train_step(own_batches(alone, seed), objective=cell["objective"])
    result["policy_alone"] = state(alone)
    longer = own_batches(trainer, made=samples(99, seed=2), some=cell["some"])
    trainer.train_step(longer, objective=cell["objective"])
    found = trainer.prediction
    result["prediction"] = None if found is None else [found.reached.ravel(), found.accepted.ravel()]
    result["accepted"] = list(trainer.accept_lengths(longer, range(1, cell["unrolling"] + 1)).values())
    return result


def keep_gradients(trainer):
    """Return a dictionary that the first step fills with every parameter's gradient."""
    kept = {}

    def listen(learner):
        step = learner.step

        def keep(*args, **kwargs):
            for parameter in learner.ddp.parameters():
                kept.setdefault(parameter, parameter.main_grad.clone())
            return step(*args, **kwargs)

        learner.step = keep

    for learner in filter(None, (trainer.learner, trainer.drafter_learner)):
        listen(learner)
    return kept


def state(trainer):
    """Return a digest of this rank's policy parameters, gradients and optimizer state."""
    policy = list(trainer.policy.parameters())
    inner = trainer.learner.optimizer.optimizer
    gradients = [] if trainer.learner.adam.distributed else [p.main_grad for p in policy]
    return digest([*policy, *gradients, *moments(inner)])


def measure_all(cells, weights):
    return [measure(cell, weights) for cell in cells]


def compare(cells):
    # Megatron's distributed optimizer holds its gradients in float32.
    cells = [{"dtype": "float32" if cell["distributed"] else "float64"} | cell for cell in cells]
    cells.sort(key=lambda cell: (cell["tensor"], cell["pipeline"], cell["context"]))
    references = [single(cell) for cell in cells]
    unique = [dict(items) for items in {tuple(sorted(cell.items())) for cell in references}]
    (weights,) = on_ranks(1, make_weights, unique)
    (values,) = on_ranks(1, measure_all, unique, weights)
    assert all(value["policy"] == value["policy_alone"] for value in values), "the drafter moved the policy on one rank"
    ranks = on_ranks(4, measure_all, cells, weights, timeout=1200)
    for index, (cell, reference) in enumerate(zip(cells, references, strict=True)):
        check(cell, values[unique.index(reference)], [rank[index] for rank in ranks])


def check(cell, want, ranks):
    first_step, later, gradient = TOLERANCE[cell["dtype"]]
    assert all(rank["policy"] == rank["policy_alone"] for rank in ranks), f"the drafter moved the policy: {cell}"
    assert ranks[0]["same"] and ranks[0]["exported"] == want["exported"], f"export is not what was loaded: {cell}"
    assert ranks[0]["logprobs"] == pytest.approx(want["logprobs"], rel=first_step), cell
    for rank in ranks:
        for ours, theirs in zip(rank["steps"], want["steps"], strict=True):
            for name in ("policy/grad_norm", "drafter/grad_norm"):  # megatron computes these in float32
                assert ours.pop(name) == pytest.approx(theirs[name], rel=max(later, 1e-6)), cell
        assert rank["steps"][0] == pytest.approx(without_norms(want["steps"][0]), rel=first_step, abs=first_step), cell
        for ours, theirs in zip(rank["steps"][1:], want["steps"][1:], strict=True):
            assert ours == pytest.approx(without_norms(theirs), rel=later, abs=later), cell
    ours, theirs = ranks[0]["prediction"], want["prediction"]
    assert (ours is None) == (theirs is None) == (cell["objective"] == "sft")
    if theirs is not None and cell["dtype"] == "float64":  # rounding changes a draft where two tokens nearly tie
        assert theirs[1].sum() > 0, "no coupled draft was right, so nothing is compared"
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=str(cell))
    if cell["dtype"] == "float64":
        assert ranks[0]["accepted"] == pytest.approx(want["accepted"], rel=1e-6), cell
    for name, reference in want["gradients"].items() if "gradients" in ranks[0] else ():
        worst = (ranks[0]["gradients"][name] - reference).abs().max() / reference.abs().max().clamp(min=1e-30)
        assert worst < gradient, f"gradient of {name} is {worst:.1e} off: {cell}"


def without_norms(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("grad_norm")}


def masked_and_left_out(weights):
    """Return metrics and drafter gradients of a step with samples that are masked, and of one without them, by loss."""
    found = []
    for loss in ("ce", "forward_kl"):
        cell = PLAIN | {"dtype": "float64", "loss": loss}
        for masked in (True, False):
            trainer = build(cell, weights[False])
            given = own_batches(trainer, some=True)
            assert sum(len(b.drafter_part.tokens) for b in given) < 0.8 * sum(len(b.tokens) for b in given)
            if masked:
                given = [replace(batch, drafter_part=None, drafter_rows=None) for batch in given]
            kept = keep_gradients(trainer)
            metrics = trainer.train_step(given, objective="grpo")
            gradients = [kept[p].tolist() for p in trainer.drafter.parameters()]
            found.append((metrics, gradients, state(trainer), trainer.prediction.reached))
    return found


def test_samples_left_out_are_samples_masked():
    """The drafter learns the same without the samples of weight 0, and the policy's bits are the same."""
    (weights,) = on_ranks(1, make_weights, [PLAIN | {"dtype": "float64"}])
    (found,) = on_ranks(1, masked_and_left_out, weights)
    for (metrics, gradients, policy, reached), (other, others, same, also) in zip(found[::2], found[1::2], strict=True):
        assert policy == same and reached.sum() > 0
        assert metrics == pytest.approx(other, rel=1e-9)
        for ours, theirs in zip(gradients, others, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(reached, also)


@pytest.mark.slow
def test_every_pair_of_settings():
    compare(pairwise())


def test_layouts_agree_to_rounding():
    compare([PLAIN | {"context": 2, "tensor": 2, "sequence": True}])
