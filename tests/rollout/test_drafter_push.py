"""The hook on a manager that updates the target only (as SGLang 0.5.15's): tensors are also loaded into the drafter."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.scheduler.drafter_push import load_twice


class Model(torch.nn.Module):
    """Loads the names it knows and skips the others, as SGLang's models do."""

    def __init__(self, *names):
        super().__init__()
        self.weights = torch.nn.ParameterDict({name: torch.zeros(2) for name in names})

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in self.weights:
                self.weights[name].data.copy_(tensor)


def manager():
    draft = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=SimpleNamespace(model=Model("mtp", "head"))))
    target = SimpleNamespace(model_runner=SimpleNamespace(model=Model("layer", "head")))
    return SimpleNamespace(tp_worker=target, draft_worker=draft)


def target_only(self, request):
    model = self.tp_worker.model_runner.model
    for bucket in request:  # a generator per bucket: it can be read once only
        model.load_weights((name, tensor) for name, tensor in bucket)
    return SimpleNamespace(success=True)


PUSH = [[("layer", torch.ones(2)), ("mtp", torch.full((2,), 2.0))], [("head", torch.full((2,), 3.0))]]


def test_drafter_loads_what_the_target_received():
    here = manager()
    assert load_twice(target_only, here, PUSH).success
    target = here.tp_worker.model_runner.model
    drafter = here.draft_worker.draft_worker.draft_runner.model
    assert target.weights["layer"][0] == 1 and target.weights["head"][0] == 3
    assert drafter.weights["mtp"][0] == 2 and drafter.weights["head"][0] == 3
    assert "load_weights" not in vars(target), "the target's loader must be its own again"


def test_a_failed_update_does_not_change_the_drafter():
    here = manager()
    result = load_twice(lambda manager, request: SimpleNamespace(success=False), here, PUSH)
    assert not result.success
    assert here.draft_worker.draft_worker.draft_runner.model.weights["mtp"][0] == 0


def test_loader_is_restored_after_an_error():
    here = manager()

    def broken(self, request):
        raise RuntimeError("link lost")

    with pytest.raises(RuntimeError, match="link lost"):
        load_twice(broken, here, PUSH)
    assert "load_weights" not in vars(here.tp_worker.model_runner.model)
