"""The models that a run writes."""

from pathlib import Path
from types import SimpleNamespace

from megatron_rlspec.config import load
from megatron_rlspec.conversion.drafter_files import read_model
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import publish, read_hf
from megatron_rlspec.run.loading import drafter_names
from megatron_rlspec.run.model_card import card
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


def test_the_card_names_what_a_model_has_and_leaves_out_what_is_not_known():
    about = {"steps": 4.0, "rollout/reward": 0.51239, "rollout/accept_length": None}
    text = card("/data/base", about, Path("runs/x/hf"), Path("runs/x/hf_drafter"))
    assert "# base, after reinforcement learning" in text and "| mean reward, last step | 0.5124 |" in text
    assert "accept length" not in text and "--drop-mtp" not in text and "/data" not in text and "runs/x" not in text
    assert "EAGLE3" in text and "--speculative-draft-model-path hf_drafter" in text
