"""`CoTrainer` beside the plain trainer of examples/own_trainer, with an embedded engine."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rlspec import DrafterConfig, Sequences
from megatron_rlspec.config import ConfigError, ParallelConfig, load
from megatron_rlspec.cotrainer import cotrainer as module
from megatron_rlspec.cotrainer.drafter import _check_stages
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.push.bucket import Bucket
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.rollout.start import embedded
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.train import runtime
from megatron_rlspec.train.step import Trainer

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS / "rollout"), str(TESTS.parent / "examples/own_trainer")]
import tiny_mimo  # noqa: E402
import train  # noqa: E402

SHAPE = tiny_mimo.config(hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, vocab=64)
OPTIONS = {"model.dtype": "float32", "spec.candidate_steps": "0,1,3", "rollout.engine": "embedded"}


@pytest.fixture(scope="module", autouse=True)
def job():
    """Make Megatron's groups, and leave them, because other files of this process make their own."""
    runtime.init_distributed(ParallelConfig())
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_mimo.write(tmp_path_factory.mktemp("own") / "model", SHAPE, tiny_mimo.weights(SHAPE)))


@pytest.fixture(autouse=True)
def engine(model, monkeypatch):
    """In place of each URL, an engine in this process."""
    config = load(None, OPTIONS | {"model.path": model})
    monkeypatch.setattr(module, "SGLangEngine", lambda url: embedded(config))


def beside(policy, model, engines=("here",), **options):
    given = {"sampling": train.SAMPLING, "candidate_steps": (0, 1, 3), **options}
    return module.CoTrainer(policy, model, engines, **given)


@pytest.fixture(scope="module")
def trained(model):
    with pytest.MonkeyPatch.context() as patch:
        config = load(None, OPTIONS | {"model.path": model})
        patch.setattr(module, "SGLangEngine", lambda url: embedded(config))
        return train.run(model, "here", 2)


def test_the_policy_is_trained_as_without_the_class(trained, model):
    policy, cotrainer, rollouts = trained
    alone = train.load_policy(model)
    optimizer = torch.optim.Adam(alone.parameters(), train.LEARNING_RATE)
    for samples in rollouts:
        train.train_policy(alone, optimizer, samples)
    for name, parameter in alone.named_parameters():
        assert torch.equal(policy.get_parameter(name), parameter)
    before = tiny_mimo.weights(SHAPE)
    changed = {name for name, tensor in cotrainer._export("drafter") if not torch.equal(tensor, before[name].float())}
    assert changed == {name for name in before if ".mtp_layers." in name}


def test_engines_hold_what_was_trained_and_get_the_rule(trained):
    _, cotrainer, _ = trained
    (engine,) = cotrainer.engines.values()
    assert engine.version == 3 and isinstance(engine.choice.present, SpecRule), "not the canary's schedule"
    difference = cotrainer._health.pusher.compare_with(engine)
    assert difference.empty and cotrainer.rule.learning.prediction is not None


def test_the_drafter_learns_as_in_our_own_loop(trained, model):
    """From rows with padding as from packed sequences: losses, gradients and the predicted acceptance."""
    (samples, _) = trained[2]
    policy = train.load_policy(model)
    cotrainer = beside(policy, model)
    cotrainer.begin_step([train.sequences(part) for part in train.parts(samples)])
    optimizer = torch.optim.SGD(policy.parameters(), 0.0)
    train.train_policy(policy, optimizer, samples)
    ours = {name: p.main_grad.clone() for name, p in cotrainer.drafting.block.named_parameters()}
    metrics = cotrainer.end_step()

    trainer = Trainer(load(None, OPTIONS | {"model.path": model}), SHAPE)
    trainer.load_hf(read_hf(model)[1])
    theirs = {}
    step = trainer.drafter_learner.step

    def capture(*given, **options):
        theirs.update({name: p.main_grad.clone() for name, p in trainer.drafter.named_parameters()})
        return step(*given, **options)

    trainer.drafter_learner.step = capture
    batches = pack(samples, depth=3, tokens_per_micro_batch=1024, advantages=[0.0] * len(samples))
    expected = trainer.train_step(batches, objective="grpo")
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-4, name
    for depth in (1, 2, 3):
        assert metrics[f"drafter_loss_{depth}"] == pytest.approx(expected[f"drafter/loss_{depth}"], rel=1e-5)
    assert metrics["drafter_tokens_k3"] == pytest.approx(trainer.prediction.tokens_per_round(3), rel=1e-4)


def test_a_step_without_samples(model):
    cotrainer = beside(train.load_policy(model), model)
    cotrainer.begin_step([])
    assert set(cotrainer.end_step()) == {"drafter_grad_norm", "drafter_skipped"}


def test_a_resumed_drafter_takes_the_same_step(trained, model, tmp_path):
    policy, cotrainer, rollouts = trained
    cotrainer.save(tmp_path / "drafter")
    resumed = beside(policy, model, drafter=DrafterConfig(lr=train.LEARNING_RATE))
    resumed.load(tmp_path / "drafter")
    assert resumed.rule.learning.state() == cotrainer.rule.learning.state()
    policy.eval()
    for one in (cotrainer, resumed):
        one.begin_step([train.sequences(part) for part in train.parts(rollouts[0])])
        for part in train.parts(rollouts[0]):
            hidden = torch.randn(30, len(part), 32, generator=torch.Generator().manual_seed(0))
            one.drafting.on_hidden(hidden, one.drafting.fields.popleft())
        one.end_step()
    policy.train()
    for name, parameter in cotrainer.drafting.block.named_parameters():
        assert torch.equal(resumed.drafting.block.get_parameter(name), parameter)


TARGET = "model.layers.0.mlp.up_proj.weight"
DRAFTER = "model.mtp_layers.0.input_proj.weight"


def damage(engine, name, times):
    """Let an engine get a wrong tensor in so many pushes."""
    send = engine.send
    left = iter(range(times))

    def wrong(bucket):
        damaged = name in bucket.names and next(left, None) is not None
        send(Bucket([(n, x + 1 if damaged and n == name else x) for n, x in bucket.tensors]))

    engine.send = wrong


@pytest.mark.parametrize(
    ("name", "times", "serving", "plain"),
    [(DRAFTER, 1, "ab", 0), (DRAFTER, 2, "ab", 1), (TARGET, 1, "ab", 0), (TARGET, 2, "a", 0)],
)
def test_a_wrong_push_is_repeated_and_a_lasting_fault_costs_drafts_or_the_engine(model, name, times, serving, plain):
    cotrainer = beside(train.load_policy(model), model, engines="ab")
    faulty = cotrainer.engines["b"]
    damage(faulty, name, times)
    metrics = cotrainer.push(1)
    assert (metrics["health/incidents"], metrics["health/plain_engines"]) == (1, plain)
    assert "".join(cotrainer.engines) == serving and bool(faulty.describe()["held"]) == (times == 2)
    metrics = cotrainer.push(2)
    assert (metrics["health/incidents"], metrics["health/serving_engines"]) == (0, len(serving))
    for engine in cotrainer.engines.values():
        assert not engine.describe()["held"] and cotrainer._health.pusher.compare_with(engine).empty


def test_without_a_sound_engine_the_push_raises(model):
    cotrainer = beside(train.load_policy(model), model)
    damage(cotrainer.engines["here"], TARGET, 2)
    with pytest.raises(HealthError, match=f"here.*{TARGET}"):
        cotrainer.push(1)


def test_a_step_whose_passes_do_not_fit_is_refused(model):
    policy = train.load_policy(model)
    cotrainer = beside(policy, model)
    batch = Sequences([torch.arange(8)], [torch.ones(8)], torch.tensor([0, 8]))
    cotrainer.begin_step([batch])
    with pytest.raises(RuntimeError, match="1 micro-batches of begin_step had no forward pass"):
        cotrainer.end_step()
    with pytest.raises(ConfigError, match="hidden states of 9 positions, but begin_step got 8"):
        policy(torch.arange(9)[None], torch.arange(9)[None], torch.ones(1, 1, 9, 9).triu(1) > 0)


def test_models_and_engines_that_do_not_fit_are_refused(model):
    policy = train.load_policy(model)
    with pytest.raises(ConfigError, match="verifier=target_only, but the engine at here .* --verifier position_keyed"):
        beside(policy, model, verifier="target_only")
    with pytest.raises(ConfigError, match="candidate_steps=0,1, .* chooses among .0, 1, 3."):
        beside(policy, model, candidate_steps=(0, 1))
    with pytest.raises(ConfigError, match="drafter.vocabulary=8 acts in `rlspec train` only"):
        beside(policy, model, drafter=DrafterConfig(vocabulary=8))
    policy.mtp_process = True
    with pytest.raises(ConfigError, match="the model has MTP layers"):
        beside(policy, model)
    policy.mtp_process = False
    policy.register_parameter("adapter", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match="the model's parameter adapter is none of MiMoForCausalLM's"):
        beside(policy, model)
    stages = {"pipeline_model_parallel_size": 2, "variable_seq_lengths": False}
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=None, **stages)
    with pytest.raises(ConfigError, match="expected variable_seq_lengths=True"):
        _check_stages(SimpleNamespace(config=config), eagle3=True)
