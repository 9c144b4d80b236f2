"""`CoTrainer` on two ranks beside a plain `GPTModel`: pipeline stages under Megatron's own schedule, and replicas."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rlspec import DrafterConfig, Sequences
from megatron_rlspec.config import ParallelConfig, load
from megatron_rlspec.cotrainer import cotrainer as module
from megatron_rlspec.rollout.start import embedded
from megatron_rlspec.train import runtime

TESTS = Path(__file__).parent.parent
PLACES = ("rollout", "train", "integrations", "../examples/own_trainer")
sys.path += [str(TESTS / place) for place in PLACES]
import tiny_mimo  # noqa: E402
import train  # noqa: E402
from small_eagle3 import SHAPE, write_drafter  # noqa: E402
from train_ranks import digest, on_ranks, samples  # noqa: E402


def build_policy(model):
    """Build this rank's stage with the example's settings, and load its weights."""
    layout = {
        "pipeline_model_parallel_size": ps.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    stage = {"pre_process": ps.is_pipeline_first_stage(), "post_process": ps.is_pipeline_last_stage()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TransformerConfig", partial(train.TransformerConfig, **layout))
        patch.setattr(train, "GPTModel", partial(train.GPTModel, **stage))
        return train.load_policy(model)


def pass_over(policy, rows):
    """Run forward and backward over the samples, one in each micro-batch."""

    def forward(iterator, model):
        sample = next(iterator)
        tokens = torch.as_tensor(sample.tokens)[None]
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        return model(tokens, torch.arange(length)[None], later), partial(loss, tokens)

    def loss(tokens, logits):
        rows = logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
        return -rows.mean(), {}

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(rows),
        model=[policy],
        num_microbatches=len(rows),
        seq_length=32,
        micro_batch_size=1,
        forward_only=False,
    )


def whole(sample):
    tokens = torch.as_tensor(sample.tokens)
    return Sequences([tokens], [torch.as_tensor(sample.loss_mask)], torch.tensor([0, len(tokens)]), seeds=[sample.seed])


def beside(policy, model, drafter=""):
    """Make the class, with an embedded engine."""
    options = {"kind": "eagle3", "path": drafter} if drafter else {}
    served = {"model.path": model, "model.dtype": "float32", "spec.candidate_steps": "0,1,3"}
    served |= {"rollout.engine": "embedded"} | {f"drafter.{key}": value for key, value in options.items()}
    module.SGLangEngine = lambda url: embedded(load(None, served))
    module.check_served_drafter = lambda *given: None  # an embedded engine does not describe its drafter
    return module.CoTrainer(
        policy,
        model,
        ["here"],
        sampling=train.SAMPLING,
        drafter=DrafterConfig(lr=1e-2, **options),
        candidate_steps=(0, 1, 3),
    )


def steps(model, drafter, stages, learns):
    """Train two steps. Return the policy's digest on this rank, the metrics, and the drafter's tensors on rank 0."""
    runtime.init_distributed(ParallelConfig(pipeline=stages))
    policy = build_policy(model)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    cotrainer = None
    if learns:
        cotrainer = beside(policy, model, drafter)
    metrics = []
    for seed in range(2):
        rows = samples(6, seed)
        optimizer.zero_grad()
        if cotrainer is not None:
            cotrainer.begin_step([whole(sample) for sample in rows])
        pass_over(policy, rows)
        optimizer.step()
        if cotrainer is not None:
            metrics.append(cotrainer.end_step())
            cotrainer.push(seed + 1)
    tensors = {}
    if cotrainer is not None:
        tensors = dict(cotrainer._export("drafter"))
        if dist.get_rank() == 0:
            assert cotrainer.rule.learning.prediction is not None
    return digest(policy.parameters()), metrics, tensors


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a policy with its MTP layer, and of one with an EAGLE-3 drafter."""
    room = tmp_path_factory.mktemp("stages")
    weights = tiny_mimo.weights(SHAPE)
    with_mtp = tiny_mimo.write(room / "mtp", SHAPE, weights)
    config = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    plain = tiny_mimo.write(room / "plain", config, {n: x for n, x in weights.items() if ".mtp_layers." not in n})
    return {"mtp": (str(with_mtp), ""), "eagle3": (str(plain), str(write_drafter(room / "drafter")))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_two_stages_train_the_drafter_as_one_does(models, kind):
    ((_, expected, alone),) = on_ranks(1, steps, *models[kind], 1, True)
    first, last = on_ranks(2, steps, *models[kind], 2, True)
    plain = on_ranks(2, steps, *models[kind], 2, False)
    assert [first[0], last[0]] == [policy for policy, *_ in plain]
    assert first[1] == last[1]
    for ours, theirs in zip(first[1], expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4, nan_ok=True), name
    assert first[2].keys() == alone.keys() and not last[2]
    for name, tensor in alone.items():
        assert np.allclose(first[2][name], tensor, rtol=1e-4, atol=1e-5), name


def share(model, ranks):
    """Train one step of the drafter on this rank's share of the samples. Return the metrics and its tensors."""
    runtime.init_distributed(ParallelConfig())
    policy = build_policy(model)
    cotrainer = beside(policy, model)
    rows = samples(6, 0)[dist.get_rank() :: ranks]
    cotrainer.begin_step([whole(sample) for sample in rows])
    pass_over(policy, rows)
    return cotrainer.end_step(), dict(cotrainer._export("drafter"))


@pytest.mark.slow
def test_two_replicas_with_unequal_shares_train_the_drafter_as_one_does(models):
    """Losses are divided by the tokens of both, so a replica with more of them counts for more."""
    model, _ = models["mtp"]
    ((expected, alone),) = on_ranks(1, share, model, 1)
    first, other = on_ranks(2, share, model, 2)
    assert first[0] == other[0]
    for name, value in expected.items():
        assert first[0][name] == pytest.approx(value, rel=1e-4, nan_ok=True), name
    for name, tensor in alone.items():
        assert np.allclose(first[1][name], tensor, rtol=1e-4, atol=1e-5), name
