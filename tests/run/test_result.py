"""The models that a run writes."""

from types import SimpleNamespace

from megatron_rlspec.config import load
from megatron_rlspec.conversion.drafter_files import read_model
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import publish, read_hf
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.run.result import build_result


def test_a_drafter_that_is_not_trained_lies_in_the_result_as_it_came(start, tmp_path):
    hf_config, tensors = read_model(start / "model")
    config = load(None, {"model.path": str(start / "model"), "drafter.train": "false"})
    policy = {name: tensors[name] + 1 for name in tensors.keys() - drafter_names(hf_config)}
    loaded = SimpleNamespace(hf_config=hf_config, tensors=tensors)
    given = (config.model.path, config.drafter, loaded, lambda scope: policy.items())
    ((target, directory),) = build_result(*given, tmp_path / "hf", None).items()
    publish(directory, target)
    check_model(target, "serve", drafter=True)
    written = read_hf(target)[1]
    assert written.keys() == tensors.keys() > policy.keys()
    assert all(written[name].equal(policy.get(name, tensors[name])) for name in tensors)
