"""Model directories: config.json, tensors and tokenizer files that do not go together, for every command."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import Case, check, ids, model_files, write_model
from safetensors.numpy import load, save

from megatron_rlspec.models.directory import check_model

TRAIN = "train --model.path model --data.path rows.jsonl --model.max_length 64 --rollout.max_new_tokens 32"
ROWS = '{"prompt": "a1", "label": "1"}\n'
DROP = object()
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
HALVED = LLAMA3 | {"factor": 2.0}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
QWEN3_MOE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "attention_bias": False}


def directory(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """A whole directory `model` beside rows.jsonl, then `change(model)`."""

    def write(here: Path) -> None:
        (here / "rows.jsonl").write_text(ROWS)
        change(write_model(here / "model"))

    return write


def configured(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        config = {key: value for key, value in (config | changes).items() if value is not DROP}
        (model / "config.json").write_text(json.dumps(config))

    return change


def setting(*expects: str, act: str = TRAIN, **changes: object) -> Case:
    shown = ", ".join(f"{key}={'-' if value is DROP else json.dumps(value)}" for key, value in changes.items())
    return Case(f"{command(act)} {shown}", act, ("config.json of", *expects), directory(configured(**changes)))


def command(act: str) -> str:
    return "dry run" if "--dry-run" in act else act.split()[0]


def value(key: str, given: object, expected: str) -> Case:
    return setting(key, expected, **{key: given})


def tensors(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        found = load((model / "model.safetensors").read_bytes())
        edit(found)
        (model / "model.safetensors").write_bytes(save(found))

    return change


def weights(name: str, edit: Callable[[dict], object], *expects: str) -> Case:
    return Case(f"weights {name}", TRAIN, expects, directory(tensors(edit)))


def files(name: str, change: Callable[[Path], object], *expects: str, act: str = TRAIN) -> Case:
    return Case(f"{command(act)} {name}", act, expects, directory(change))


Q, LAYER = "model.layers.0.self_attn.q_proj.weight", "model.layers.0."

VALUES = [  # one for each type and rule
    value("rope_theta", 0, "greater than 0"),
    value("rope_theta", DROP, "no rope_theta"),
    value("eos_token_id", 10**6, "below vocab_size"),
    value("num_key_value_heads", 3, "a divisor of num_attention_heads=2"),
    value("num_attention_heads", 4, "num_attention_heads x head_dim=32"),
    value("head_dim", 7, "an even number"),
    value("hidden_size", 24, "hidden_size=24, but lm_head.weight has 16"),
    value("num_hidden_layers", 11, "the weights hold 1 layers"),
    value("max_position_embeddings", 32, "model.max_length of at most 26"),
    value("max_position_embeddings", 69, "6 more, which SGLang needs; expected model.max_length of at most 63"),
    value("tie_word_embeddings", True, "lm_head.weight of their own"),
    value("torch_dtype", "bogus", "'bfloat16'"),
    value("dtype", "bfloat16", "torch_dtype=float32"),
    setting("architecture GPT2LMHeadModel", "not trained", architectures=["GPT2LMHeadModel"]),
    setting("architecture Gemma3ForCausalLM", "one rotary base for all layers", architectures=["Gemma3ForCausalLM"]),
    setting("attention_bias=true", "biases of Llama's attention", architectures=["LlamaForCausalLM"]),
    setting("model_type=qwen2", "expected qwen3", architectures=["Qwen3ForCausalLM"]),
    value("model_type", "llama", "mimo or qwen2"),
    value("num_nextn_predict_layers", 0, "drafter"),
]

IGNORED_TODAY = [  # settings that change what a model computes
    value("rope_scaling", {"type": "dynamic", "factor": 4.0}, 'type "dynamic"; expected default, llama3 or yarn'),
    value("rope_scaling", {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings"),
    value("rope_scaling", YARN | {"attention_factor": 1.0}, "rope_scaling.attention_factor=1.0: not implemented"),
    value("rope_scaling", YARN | {"beta_fast": 1}, "beta_slow=1: expected less than beta_fast=1"),
    value("rope_scaling", {"type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
    value("rope_parameters", {"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    value("rope_parameters", {"rope_theta": 5}, "rope_theta=640000"),
    value("rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    setting("rope_scaling.factor=8.0", "rope_parameters.factor=2.0", rope_scaling=LLAMA3, rope_parameters=HALVED),
    setting("rope_scaling.rope_type", "one of the two", rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"}),
    value("partial_rotary_factor", 0.5, "equal to 1"),
    value("use_sliding_window", True, "only full attention"),
    value("layer_types", ["sliding_attention"], "full_attention"),
    value("layer_types", ["full_attention"] * 3, "num_hidden_layers=1"),
    value("quantization_config", {"quant_method": "fp8"}, "quantised"),
    value("mlp_bias", True, "unknown"),
    value("n_routed_experts", 8, "no experts"),
    value("kv_lora_rank", 8, "kv_lora_rank"),
]

WEIGHTS = [
    weights("of a lost layer norm", lambda t: t.pop(LAYER + "input_layernorm.weight"), "lacks model.layers.0.input"),
    weights("without head", lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
    weights("without drafter", lambda t: [t.pop(n) for n in list(t) if "mtp" in n], "of the drafter's", "--add-mtp"),
    weights("of half a drafter", lambda t: t.pop("model.mtp_layers.0.input_proj.weight"), "input_proj", "drafter"),
    weights("of a second drafter", lambda t: t.update({"model.mtp_layers.1.x": np.ones(1, "f4")}), "2 drafter layers"),
    weights("flattened", lambda t: t.update({Q: t[Q].reshape(-1)}), Q, "[256]", "[16, 16]"),
    weights("of integers", lambda t: t.update({Q: t[Q].astype("i4")}), Q, "I32", "BF16"),
    weights(
        "with o_proj bias", lambda t: t.update({LAYER + "self_attn.o_proj.bias": np.ones(16, "f4")}), "o_proj.bias"
    ),
]


def indexed(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        os.rename(model / "model.safetensors", model / "a.safetensors")
        names = load((model / "a.safetensors").read_bytes())
        index: dict = {"weight_map": dict.fromkeys(names, "a.safetensors")}
        edit(index)
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def cut(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-10])


def replaced(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def as_pipe(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink()
        os.mkfifo(model / name)

    return change


def without(*names: str) -> Callable[[Path], None]:
    return lambda model: [(model / name).unlink() for name in names]


def without_tokenizer(model: Path) -> None:
    for name in model_files():
        if "token" in name:
            (model / name).unlink()


CONFIG = "config.json"
SERVE, CONVERT = "serve --model model --device cpu --port 31997", "convert model out"
DRY, SFT = TRAIN + " --dry-run", "sft --model.path model --sft.path rows.jsonl"
PROFILE = "profile --model model --out table.json"

FILES = [
    Case("a name of the Hub", f"{TRAIN} --model.path Qwen/Q-1", ("`hf download Qwen/Q-1 --local-dir Q-1`",)),
    Case("a run directory", TRAIN, ("its model is model/hf",), {"model/hf/config.json": "{}", "rows.jsonl": ROWS}),
    Case("no directory", TRAIN, ("model: no such directory", "Hugging Face"), {"rows.jsonl": ROWS}),
    files("a port", str, "--port 80000: expected a port from 1 to 65535", act="serve --model model --port 80000"),
    files("without config.json", without(CONFIG), "config.json: No such file"),
    files("config.json empty", replaced(CONFIG, ""), "config.json: not valid JSON", "empty"),
    files("config.json with a byte order mark", replaced(CONFIG, "\ufeff{}"), "byte order mark"),
    files("without weights", without("model.safetensors"), "neither model.safetensors nor"),
    files("weights cut", cut, "model.safetensors: truncated or not safetensors"),
    files("weights a pipe", as_pipe("model.safetensors"), "model.safetensors", "expected safetensors"),
    files("index without map", indexed(lambda i: i.pop("weight_map")), "index.json: expected weight_map"),
    files("index outside", indexed(lambda i: i["weight_map"].update({Q: "../a.safetensors"})), "expected a file name"),
    files(
        "index of a lost file", indexed(lambda i: i["weight_map"].update({Q: "b.safetensors"})), "b.safetensors: no s"
    ),
    files("index of a lost tensor", indexed(lambda i: i["weight_map"].update({"x": "a.safetensors"})), "lacks x"),
    files("without tokenizer", without_tokenizer, "no tokenizer", "tokenizer.json"),
    files("tokenizer.json cut", replaced("tokenizer.json", "{"), "tokenizer.json: not valid JSON"),
    files("stop token", replaced("generation_config.json", '{"eos_token_id": 99999}'), "eos_token_id=99999"),
]

COMMANDS = [setting("rope_theta", act=act, rope_theta=-1) for act in (SFT, DRY, SERVE, CONVERT, PROFILE)]
COMMANDS += [
    setting("tie_word_embeddings", act=act, tie_word_embeddings=True) for act in (SFT, SERVE, CONVERT, PROFILE)
]
COMMANDS += [
    setting("quantization_config", act=CONVERT, quantization_config={"quant_method": "fp8"}),
    setting("quantization_config", act=DRY, quantization_config={"quant_method": "fp8"}),
    files("of two layers", configured(num_hidden_layers=2), "num_hidden_layers=2", act=SERVE),
    files("without tokenizer", without_tokenizer, "no tokenizer", act=SFT),
]

CASES = VALUES + IGNORED_TODAY + WEIGHTS + FILES + COMMANDS


@pytest.fixture(scope="module", autouse=True)
def imports():
    model_files()


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def test_the_directory_that_is_changed_is_good(tmp_path):
    for use in ("train", "convert", "serve"):
        assert check_model(write_model(tmp_path / "model"), use)["architectures"] == ["MiMoForCausalLM"]


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"rope_scaling": None, "use_mrope": False, "_name_or_path": "x", "use_cache": True, "temperature": 0.6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 640000}},
        {"layer_types": ["full_attention"], "attention_dropout": 0.0, "attention_bias": True},
        {"eos_token_id": [2, 3], "pad_token_id": -1, "model_type": "mimo"},
    ],
    ids=str,
)
def test_harmless_settings_pass(changes, tmp_path):
    configured(**changes)(write_model(tmp_path / "model"))
    check_model(tmp_path / "model", "train")
