"""What hooks decide on slime's train ranks, without slime: its functions and Megatron's are stand-ins."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rlspec.integrations import slime as package
from megatron_rlspec.integrations.slime import state as slime_state

NAME = "megatron_rlspec.integrations.slime.hooks"
STANDING_IN = {
    "megatron.training": {},
    "megatron.training.checkpointing": {"get_checkpoint_name": lambda save, step, **_: f"{save}/iter_{step:07d}"},
    "megatron.training.global_vars": {"get_args": None},
    "slime": {},
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.model": {
        "get_load_checkpoint_path_by_args": lambda args: f"{args.load}/iter_0000007"
    },
    "slime.backends.megatron_utils.model_provider": {"_get_model_provider_func": None},
    "slime.utils": {},
    "slime.utils.misc": {"load_function": None},
}


@pytest.fixture
def hooks(monkeypatch):
    for name, held in STANDING_IN.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent in STANDING_IN:
            setattr(sys.modules[parent], own, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.delattr(package, "hooks", raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    found = importlib.import_module(NAME)
    yield found
    sys.modules.pop(NAME, None)


@pytest.fixture
def given(hooks, tmp_path, monkeypatch):
    """The arguments of a run that goes on from a checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MiMoForCausalLM"]}))
    args = Namespace(
        hf_checkpoint=str(tmp_path),
        rlspec={"folder": str(tmp_path / "run")},
        load=str(tmp_path / "saved"),
        save=str(tmp_path / "saved"),
        finetune=False,
        no_load_optim=False,
        no_save_optim=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    monkeypatch.setattr(hooks, "get_args", lambda: args)
    return args


def resume(hooks):
    return hooks._thaw(None, [SimpleNamespace(role="actor")])


def saved(given, step=7):
    return Path(given.load, f"iter_{step:07d}", "rlspec-drafter")


def test_a_model_that_hides_its_mtp_layer_is_refused(hooks, given, monkeypatch):
    """slime would train the layer with the policy."""
    hidden = SimpleNamespace(language_model=SimpleNamespace(mtp_process=True))
    build = lambda pre_process, post_process: hidden  # noqa: E731
    monkeypatch.setattr(hooks.slime_provider, "_get_model_provider_func", lambda args, role: build)
    with pytest.raises(ValueError, match="SimpleNamespace holds no MTP layer itself"):
        hooks.model_provider(post_process=True)
    assert hooks.model_provider(post_process=False) is hidden  # other pipeline stages have none


def test_what_rollouts_taught_is_kept_without_optimizer_states(hooks, given, tmp_path):
    slime_state.write_rollouts(tmp_path / "run", {"learnt": 1})
    given.no_save_optim = given.no_load_optim = True
    hooks._save(None, 7, [SimpleNamespace(role="actor")])
    slime_state.write_rollouts(tmp_path / "run", {"learnt": 2})
    resume(hooks)
    assert slime_state.read_rollouts(tmp_path / "run") == {"learnt": 1}
    given.no_load_optim = False
    resume(hooks)  # there are no moments
    given.finetune = True
    resume(hooks)
    assert slime_state.read_rollouts(tmp_path / "run") is None


class Beside:
    """An EAGLE-3 drafter that is trained, or frozen."""

    def __init__(self, learner):
        self.learners = {} if learner is None else {"drafter": learner}
        self.read_from = None

    def make_ready(self):
        pass

    def copy_weights(self):
        pass

    def layout(self):
        return {}

    def read(self, folder):
        self.read_from = folder


@pytest.fixture
def beside(hooks, given, monkeypatch):
    """Resume with such a drafter; return it, and the learners whose moments were loaded."""
    monkeypatch.setattr(hooks, "SlimeEagle3", Beside)

    def resumed(learner):
        loaded = {}
        monkeypatch.setattr(hooks.checkpoint, "load", lambda folder, learners, *_, **__: loaded.update(learners))
        drafter = Beside(learner)
        monkeypatch.setattr(hooks, "_drafter", drafter)
        resume(hooks)
        return drafter, loaded

    return resumed


@pytest.mark.parametrize(("before", "now"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_drafter_may_be_frozen_or_trained_from_a_checkpoint_on(before, now, beside, given):
    saved(given).mkdir(parents=True)
    (saved(given) / "layout.json").write_text("{}")
    if before:
        (saved(given) / "drafter-tensor0-pipeline0.safetensors").touch()
    drafter, loaded = beside("learner" if now else None)
    assert loaded == ({"drafter": "learner"} if before and now else {})
    assert drafter.read_from == (None if before and now else saved(given))


def test_a_checkpoint_that_lost_its_drafter_is_refused(beside, given, caplog):
    saved(given).parent.mkdir(parents=True)
    beside("learner")
    assert "the drafter begins from --drafter.path" in caplog.text  # slime alone wrote this checkpoint
    saved(given, 5).mkdir(parents=True)
    (saved(given, 5) / "layout.json").write_text("{}")
    with pytest.raises(ValueError, match=r"iter_0000007/rlspec-drafter is missing, .* --ckpt-step") as error:
        beside("learner")
    assert "\n" not in str(error.value)
