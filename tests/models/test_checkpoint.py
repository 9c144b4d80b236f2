"""Checkpoints on disk appear whole or not at all; every defect is reported in one line."""

import pytest
import torch
import transformers
from weight_oracles import mimo_checkpoint

from megatron_rlspec.models.hf_files import CheckpointError, read_hf, write_hf


@pytest.fixture
def checkpoint():
    return mimo_checkpoint()


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 100_000])
def test_round_trip_single_and_sharded(tmp_path, checkpoint, shard_bytes):
    config, tensors = checkpoint
    write_hf(tmp_path / "out", config, tensors.items(), shard_bytes=shard_bytes)
    again, lazy = read_hf(tmp_path / "out")
    assert again == config and set(lazy) == set(tensors)
    assert all(torch.equal(lazy[name], tensor) for name, tensor in tensors.items())
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 100_000)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_states_the_type_that_the_weights_have(tmp_path, checkpoint, key):
    config, tensors = checkpoint
    del config["torch_dtype"]
    write_hf(tmp_path / "out", {**config, key: "bfloat16"}, tensors)
    assert read_hf(tmp_path / "out")[0][key] == "float32"
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_a_tensor_that_is_not_finite_is_named(tmp_path, checkpoint):
    config, tensors = checkpoint
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.inf
    write_hf(tmp_path / "out", config, tensors)
    _, lazy = read_hf(tmp_path / "out")
    assert "model.layers.1.mlp.up_proj.weight" in lazy, "its name is looked for, and the tensor not read"
    with pytest.raises(CheckpointError, match=r"safetensors: model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
        dict(lazy)


def test_a_killed_writer_leaves_no_checkpoint(tmp_path, checkpoint):
    config, tensors = checkpoint

    def killed():
        yield from list(tensors.items())[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf(tmp_path / "out", config, killed(), shard_bytes=1)
    assert not (tmp_path / "out").exists()
    write_hf(tmp_path / "out", config, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
