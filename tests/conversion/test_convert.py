"""Conversion: exact round trips, resumption, fresh drafters, and Megatron's own loader on the other side."""

import json
import os
import shutil

import pytest
import torch
from moe_oracles import CONFIGS, checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from weight_oracles import mimo_checkpoint

from megatron_rlspec import files
from megatron_rlspec.commands.convert import main
from megatron_rlspec.config import ConfigError
from megatron_rlspec.conversion.convert import config_with_drafter, convert, plan
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.models.names import name_table
from megatron_rlspec.run import identity, state_file


def hf_directory(tmp_path, model="mimo", **changes):
    if model == "mimo":
        config, tensors = mimo_checkpoint(**changes)
    else:
        config = {**CONFIGS[model], **changes}
        tensors = checkpoint(config, tmp_path)
        # as published
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    write_hf(tmp_path / "hf", config, tensors, shard_bytes=200_000)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "hf" / "tokenizer.json"))
    return config, tensors


def same(tensors, directory) -> bool:
    again = read_hf(directory)[1]
    return set(again) == set(tensors) and all(
        torch.equal(again[n], t) and again[n].dtype == t.dtype for n, t in tensors.items()
    )


@pytest.mark.parametrize(("model", "spec"), [("mimo", "te"), ("glm4_moe", "te"), ("deepseek_v3", "local")])
def test_round_trip_is_exact(tmp_path, model, spec):
    """Published files repeat embedding and head in a drafter with experts. vLLM reads these copies."""
    config, tensors = hf_directory(tmp_path, model)
    convert(plan(tmp_path / "hf", tmp_path / "megatron", spec=spec))
    convert(plan(tmp_path / "megatron", tmp_path / "back"))
    assert same(tensors, tmp_path / "back")
    assert read_hf(tmp_path / "back")[0] == config and (tmp_path / "back" / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))


def empty_step(tmp_path, **layout):
    """Make the directory of a run's checkpoint, without tensors."""
    step = tmp_path / "run/checkpoints/step-000001"
    step.mkdir(parents=True)
    (step / "layout.json").write_text(json.dumps(layout))
    return step


@pytest.mark.parametrize("spec", ["te", "local"])
def test_a_checkpoint_of_a_run_is_read_by_the_specs_of_its_ranks(tmp_path, spec):
    """Local specs cut the down projections of latent attention, and Transformer Engine's hold them whole."""
    config, tensors = hf_directory(tmp_path, "deepseek_v3")
    table = name_table(config, spec)
    step = empty_step(tmp_path, tensor=2, drafter="mtp")
    for rank in (0, 1):
        held = {"policy": {}, "drafter": {}}
        for name, row in table.rows.items():
            kind = "bias" if name.endswith("expert_bias") else "parameter"
            shard = table.shard(name, row.layout.fuse([tensors[hf] for hf in row.hf]), rank, 2)
            of = held["drafter" if table.is_drafter(name) else "policy"]
            of[f"{kind}.{table.te_name(name) if spec == 'te' else name}"] = shard.clone()
        for which, found in held.items():
            tensor_file.save(found, step / f"{which}-tensor{rank}-pipeline0.safetensors")
    convert(plan(step, tmp_path / "out", hf=tmp_path / "hf"))
    assert same(tensors, tmp_path / "out")


def test_a_runs_checkpoint_takes_config_and_tokenizer_of_the_model_that_the_run_began_with(tmp_path, monkeypatch):
    """The run's config.json can name that model by a relative path, and another directory can have this name here."""
    config, tensors = hf_directory(tmp_path)
    step = empty_step(tmp_path, tensor=1, drafter="mtp")
    held = {f"parameter.{name}": row.layout.fuse([tensors[hf] for hf in row.hf]) for name, row in rows(config).items()}
    tensor_file.save(held, step / "policy-tensor0-pipeline0.safetensors")
    (tmp_path / "run/config.json").write_text(json.dumps({"model": {"path": "hf"}, "drafter": {"path": ""}}))
    known = {"model.path": identity.of_model(tmp_path / "hf")}
    state_file.write(state_file.of(step), {"identity": known}, state_file.Drawn())
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "hf", tmp_path / "elsewhere/hf")
    (tmp_path / "elsewhere/hf/config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="hf: another content of model.path than the run began with"):
        main([str(step), "out"])
    assert main([str(step), "out", "--hf", str(tmp_path / "hf")]) == 0
    monkeypatch.chdir(tmp_path)
    assert main([str(step), "out"]) == 0
    assert same(tensors, tmp_path / "out") and same(tensors, tmp_path / "elsewhere/out")


@pytest.mark.parametrize("has_drafter", [True, False])
def test_a_drafter_that_was_not_trained_is_that_of_the_model(tmp_path, has_drafter):
    config, tensors = hf_directory(tmp_path, num_nextn_predict_layers=int(has_drafter))
    step = empty_step(tmp_path, tensor=1, drafter=False)
    held = {}
    for name, row in rows({**config, "num_nextn_predict_layers": 0}).items():
        held[f"parameter.{name}"] = row.layout.fuse([tensors[hf] + 1 for hf in row.hf])
    tensor_file.save(held, step / "policy-tensor0-pipeline0.safetensors")
    convert(plan(step, tmp_path / "out", hf=tmp_path / "hf"))
    names = name_table(config)
    expected = {name: tensor if name in names.drafter_names else tensor + 1 for name, tensor in tensors.items()}
    assert same(expected, tmp_path / "out") and read_hf(tmp_path / "out")[0] == config


def rows(config):
    return name_table(config, "local").rows


def test_bfloat16_keeps_its_bits(tmp_path):
    config, tensors = mimo_checkpoint(tie_word_embeddings=True)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_hf(tmp_path / "hf", config, tensors)
    convert(plan(tmp_path / "hf", tmp_path / "megatron"))
    convert(plan(tmp_path / "megatron/release", tmp_path / "back"))  # one step, beside the tracker file
    assert same(tensors, tmp_path / "back")


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, to):
    hf_directory(tmp_path)
    convert(plan(tmp_path / "hf", tmp_path / "megatron"))
    before = sorted(tmp_path.iterdir())
    source = tmp_path / ("hf" if to == "megatron" else "megatron")

    def interrupted(label):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan(source, tmp_path / "out"), interrupted)
    assert sorted(tmp_path.iterdir()) == before


def test_a_second_conversion_into_the_same_target_is_refused(tmp_path):
    _, tensors = hf_directory(tmp_path)

    def meanwhile(label):
        with pytest.raises(files.FileError, match="another process uses it"):
            convert(plan(tmp_path / "hf", tmp_path / "out"))

    late = plan(tmp_path / "hf", tmp_path / "out")
    convert(plan(tmp_path / "hf", tmp_path / "out"), meanwhile)
    with pytest.raises(files.FileError, match="exists already"):
        convert(late)
    assert not list(tmp_path.glob(".*"))
    convert(plan(tmp_path / "out", tmp_path / "back"))
    assert same(tensors, tmp_path / "back")


def test_others_may_read_the_files(tmp_path):
    hf_directory(tmp_path)
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    (tmp_path / "hf/tokenizer_config.json").chmod(0o600)
    old = os.umask(0o027)
    try:
        convert(plan(tmp_path / "hf", tmp_path / "megatron"))
        convert(plan(tmp_path / "megatron", tmp_path / "out"))
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o640}


def test_a_fresh_drafter_reads_the_embedding_through_the_first_layer(tmp_path):
    """Qwen2 becomes a MiMo with the same target."""
    config, tensors = mimo_checkpoint(architectures=["Qwen2ForCausalLM"], num_nextn_predict_layers=0)
    write_hf(tmp_path / "hf", config, tensors)
    convert(plan(tmp_path / "hf", tmp_path / "out", add_mtp=True, to="hf"))
    new_config, lazy = read_hf(tmp_path / "out")
    assert new_config == {**config, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    assert all(torch.equal(lazy[name], tensor) for name, tensor in tensors.items())
    mtp = {n.removeprefix("model.mtp_layers.0."): lazy[n] for n in lazy if "mtp_layers" in n}
    first = {n.removeprefix("model.layers.0."): t for n, t in tensors.items() if n.startswith("model.layers.0.")}
    assert all(torch.equal(mtp[name], tensor) for name, tensor in first.items())
    # MiMo's order: hidden, embedding.
    assert torch.equal(mtp["input_proj.weight"], torch.cat((torch.zeros(64, 64), torch.eye(64)), 1))
    # Scales are the model's own: the embedding's root mean square, and a final norm for logits of deviation 1.
    rms = tensors["model.embed_tokens.weight"].square().mean().sqrt()
    torch.testing.assert_close(mtp["token_layernorm.weight"], rms.expand(64))
    torch.testing.assert_close(mtp["hidden_layernorm.weight"], rms.expand(64))
    norm = tensors["model.norm.weight"]
    head = tensors["lm_head.weight"]
    deviation = (head * norm).square().sum(1).mean().sqrt()
    assert deviation > 1
    torch.testing.assert_close(mtp["final_layernorm.weight"], norm / deviation)
    # The same by way of Megatron.
    assert main([str(tmp_path / "hf"), str(tmp_path / "megatron"), "--add-mtp"]) == 0
    assert main([str(tmp_path / "megatron"), str(tmp_path / "back")]) == 0
    assert same(dict(lazy), tmp_path / "back")


@pytest.mark.parametrize("model", ["glm4_moe", "deepseek_v3"])
def test_a_fresh_drafter_with_experts_takes_the_first_layer_that_has_them(tmp_path, model):
    config, tensors = hf_directory(tmp_path, model, num_nextn_predict_layers=0)
    own = {n: t for n, t in tensors.items() if not n.startswith("model.layers.4.")}
    write_hf(tmp_path / "plain", config, own)
    convert(plan(tmp_path / "plain", tmp_path / "out", add_mtp=True, to="hf"))
    lazy = read_hf(tmp_path / "out")[1]
    for name, tensor in own.items():
        assert torch.equal(lazy[name], tensor)
        if name.startswith("model.layers.1."):
            assert torch.equal(lazy[name.replace("layers.1.", "layers.4.")], tensor)
    assert torch.equal(lazy["model.layers.4.eh_proj.weight"], torch.cat((torch.eye(64), torch.zeros(64, 64)), 1))


def test_a_megatron_checkpoint_without_config_json_is_read_with_another_one(tmp_path):
    hf_directory(tmp_path)
    convert(plan(tmp_path / "hf", tmp_path / "megatron"))
    (tmp_path / "megatron/release/config.json").unlink()
    command = [str(tmp_path / "megatron"), str(tmp_path / "x")]
    with pytest.raises(ConfigError, match="config.json: No such file"):
        main(command)
    assert main([*command, "--hf", str(tmp_path / "hf")]) == 0


def test_a_family_for_which_no_engine_has_a_drafter_gets_none():
    with pytest.raises(ValueError, match="architecture Qwen3ForCausalLM is not given a drafter; those are Llama"):
        config_with_drafter({"architectures": ["Qwen3ForCausalLM"]})
