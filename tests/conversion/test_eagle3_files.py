"""The directory of an EAGLE-3 drafter: what `rlspec convert --add-eagle3` writes, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from weight_oracles import mimo_checkpoint

from megatron_rlspec.commands.convert import main
from megatron_rlspec.conversion.drafter_files import (
    make_drafter,
    read_model,
    read_with_drafter,
    weights_of,
    words,
)
from megatron_rlspec.conversion.eagle3 import check_drafter
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import CheckpointError, write_hf
from megatron_rlspec.models.names import name_table

LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a small model with an MTP layer, and return (its directory, its config.json, its tensors)."""
    config, tensors = mimo_checkpoint(num_hidden_layers=LAYERS, eos_token_id=100)
    folder = tmp_path_factory.mktemp("target") / "model"
    write_hf(folder, config, tensors)
    (folder / "tokenizer.model").write_bytes(b"0")
    return folder, config, tensors


@pytest.fixture
def drafter(model, tmp_path):
    make_drafter(model[0], tmp_path / "drafter", 16)
    return tmp_path / "drafter"


def test_a_fresh_drafter_has_the_layout_that_sglang_loads(model, tmp_path, capsys):
    folder, hf, tensors = model
    assert main([str(folder), str(tmp_path / "drafter"), "--add-eagle3", "--draft-vocabulary", "16"]) == 0
    assert "drafts from 16 words and reads the outputs of layers 0, 1, 2" in capsys.readouterr().out
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 16
    found = load_file(tmp_path / "drafter/model.safetensors")
    ids = found["d2t"] + torch.arange(16)  # SGLang's hot_token_id
    assert ids.tolist() == [*range(15), 100] and found["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"][ids])
    assert found["fc.weight"].shape == (hf["hidden_size"], 3 * hf["hidden_size"])
    assert found["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hf["hidden_size"]
    assert set(name_table(config).drafter_names) == set(found)


def test_a_policy_is_read_with_drafters_of_other_directories(model, drafter, tmp_path):
    folder, hf, tensors = model
    config, found = read_with_drafter(folder, drafter)
    assert config[DRAFTER]["draft_vocab_size"] == 16 and config["num_nextn_predict_layers"] == 0
    assert {name for name, _ in weights_of(found)} == found.keys() - {"eagle3.d2t", "eagle3.t2d"}
    other = {name: tensor + 1 if ".mtp_layers." in name else tensor for name, tensor in tensors.items()}
    write_hf(tmp_path / "other", hf, other)
    config, found = read_with_drafter(folder, tmp_path / "other")
    assert DRAFTER not in config and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], other[name]) for name in tensors)
    write_hf(tmp_path / "plain", hf, {name: t for name, t in tensors.items() if ".mtp_layers." not in name})
    with pytest.raises(CheckpointError, match="lacks model.mtp_layers.0.* expected a drafter"):
        read_with_drafter(folder, tmp_path / "plain")


IDS = "eagle_aux_hidden_state_layer_ids"
REFUSED = {
    "a layer that the target lacks": ({"eagle_config": {IDS: [0, 1, 3]}}, {}, "the target has 4 layers"),
    "SGLang's default of a small target": ({"eagle_config": None}, {}, "SGLang's default [1, 1, 0]"),
    "a norm that is not there": ({"fc_norm": True}, {}, "lacks fc_norm.0.weight"),
    "of another class": ({"architectures": ["Eagle3Speculator"]}, {}, "expected [LlamaForCausalLMEagle3]"),
    "an unknown key": ({"parallel_drafts": 3}, {}, "parallel_drafts=3: not implemented"),
    "a map out of order": ({}, {"d2t": torch.arange(16).flip(0) * 3}, "must ascend"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_drafter_that_does_not_fit_is_refused_in_one_line(case, model, drafter):
    config, tensors, message = REFUSED[case]
    check_drafter(drafter, model[1], str(model[0]))
    stated = json.loads((drafter / "config.json").read_text()) | config
    (drafter / "config.json").write_text(json.dumps(stated))
    held = load_file(drafter / "model.safetensors") | tensors
    save_file({name: x for name, x in held.items() if x is not None}, drafter / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        check_drafter(drafter, model[1], str(model[0]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_drafter_of_torchspec_is_read_as_it_comes(model, drafter, tmp_path):
    """`tools/convert_to_hf.py` writes it for vLLM: float16, other names, no maps, and with the target's embedding."""
    folder, hf, target = model
    made = load_file(drafter / "model.safetensors")
    own = {name: tensor for name, tensor in made.items() if name not in ("d2t", "t2d")}
    own |= {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    own = {name.replace("midlayer.", "layers.0."): tensor.half() for name, tensor in own.items()}
    config = json.loads((drafter / "config.json").read_text())
    config |= {"draft_vocab_size": config["vocab_size"], "_torchspec_version": "0.1", "torch_dtype": "float16"}
    config |= {"attention_bias": False, "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    save_file(own, tmp_path / "theirs/model.safetensors", metadata={"format": "pt"})
    check_drafter(tmp_path / "theirs", hf, str(folder))
    described, joined = read_model(folder, tmp_path / "theirs")
    assert words(joined, described).tolist() == list(range(128))
    assert set(name_table(described).drafter_names) <= set(joined)
    up = "midlayer.mlp.up_proj.weight"
    assert torch.equal(joined[f"eagle3.{up}"], made[up].half())


@pytest.mark.parametrize("where", ["config.json", "eagle_config"])
def test_further_layers_and_norms_are_read(where, model, drafter):
    """The norms' older names, and a norm of the second layer that SGLang stores and does not use."""
    config, held = json.loads((drafter / "config.json").read_text()), load_file(drafter / "model.safetensors")
    config |= {"num_hidden_layers": 2, "use_aux_norm": True, "norm_output": True}
    (config if where == "config.json" else config["eagle_config"])["norm_before_fc"] = True
    second = {
        name.replace("midlayer.", "layers.1."): x.clone() for name, x in held.items() if name.startswith("midlayer.")
    }
    for name in "qkv":
        second[f"layers.1.self_attn.{name}_proj.weight"] = held[f"midlayer.self_attn.{name}_proj.weight"].chunk(2, 1)[0]
    hidden = model[1]["hidden_size"]
    older = {"aux_norm_low.weight": 2.0, "aux_norm_mid.weight": 3.0, "aux_norm_high.weight": 4.0}
    norms = {name: torch.full((hidden,), value) for name, value in older.items()}
    held |= second | norms | {"input_norm.weight": torch.ones(3 * hidden)}
    (drafter / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in held.items()}, drafter / "model.safetensors")
    check_drafter(drafter, model[1], str(model[0]))
    described, joined = read_model(model[0], drafter)
    names = set(name_table(described).drafter_names)
    assert names <= set(joined) and {"eagle3.input_norm.weight", "eagle3.layers.1.hidden_norm.weight"} <= names
    assert [float(joined[f"eagle3.fc_norm.{i}.weight"][0]) for i in range(3)] == [2, 3, 4]
    assert "eagle3.layers.1.input_layernorm.weight" not in names
