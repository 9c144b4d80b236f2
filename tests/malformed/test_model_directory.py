"""Model directories: config.json, tensors and tokenizer files that do not go together, for every command."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Case, check, ids, model_files, write_model
from safetensors.numpy import load, save

from megatron_rlspec.models.directory import check_model

TRAIN = "train --model.path model --data.path rows.jsonl --model.max_length 64 --rollout.max_new_tokens 32"
ROWS = '{"prompt": "a1", "label": "1"}\n'
DROP = object()
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


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
    return setting(expected, **{key: given})


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

VALUES = [  # one for each rule
    value("rope_theta", DROP, "no rope_theta"),
    value("num_key_value_heads", 3, "a divisor of num_attention_heads=2"),
    value("hidden_size", 24, "hidden_size=24, but model.embed_tokens.weight has shape"),
    setting("architecture GPT2LMHeadModel", "not trained or converted", architectures=["GPT2LMHeadModel"]),
    value("model_type", "qwen3", "mimo or qwen2 or llama"),
    value("num_nextn_predict_layers", 0, "drafter"),
]

NOT_IMPLEMENTED = [  # settings that change what a model computes
    value("rope_scaling", {"type": "dynamic", "factor": 4.0}, 'type "dynamic"; expected default or llama3 or yarn'),
    value("rope_scaling", YARN | {"attention_factor": 1.0}, "rope_scaling.attention_factor=1.0: not implemented"),
    value("quantization_config", {"quant_method": "fp8"}, "not implemented for MiMoForCausalLM"),
]

WEIGHTS = [
    weights("without head", lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
    weights("without drafter", lambda t: [t.pop(n) for n in list(t) if "mtp" in n], "of the drafter's", "--add-mtp"),
    weights("of integers", lambda t: t.update({Q: t[Q].astype("i4")}), Q, "I32", "BF16"),
]


def indexed(model: Path) -> None:
    os.rename(model / "model.safetensors", model / "a.safetensors")
    names = load((model / "a.safetensors").read_bytes())
    places = dict.fromkeys(names, "a.safetensors") | {Q: "b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def cut(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-10])


def without_tokenizer(model: Path) -> None:
    for name in model_files():
        if "token" in name:
            (model / name).unlink()


SERVE, CONVERT = "serve --model model --device cpu --port 31997", "convert model out"
DRY = TRAIN + " --dry-run"

FILES = [
    Case(
        "a name of the Hub",
        f"{TRAIN} --model.path Qwen/Q-1",
        ("no such directory, and no model of that name from the Hub",),
    ),
    Case("a run directory", TRAIN, ("its model is model/hf",), {"model/hf/config.json": "{}", "rows.jsonl": ROWS}),
    Case("no directory", TRAIN, ("model: no such directory", "Hugging Face"), {"rows.jsonl": ROWS}),
    files("weights cut", cut, "model.safetensors: truncated or not safetensors"),
    files("index of a lost file", indexed, "b.safetensors: no s"),
    files("of more layers", configured(num_hidden_layers=11), "model: lacks model.layers.1."),
    files("with an adapter", lambda model: (model / "adapter_config.json").touch(), "a LoRA adapter is not read"),
    files("without tokenizer", without_tokenizer, "no tokenizer", "tokenizer.json"),
]

COMMANDS = [setting("rope_theta", act=act, rope_theta=-1) for act in (DRY, SERVE, CONVERT)]

CASES = VALUES + NOT_IMPLEMENTED + WEIGHTS + FILES + COMMANDS


@pytest.fixture(scope="module", autouse=True)
def imports():
    model_files()


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_line(case, tmp_path, capfd, monkeypatch):
    check(case, tmp_path, capfd, monkeypatch)


def test_the_directory_that_is_changed_is_good(tmp_path):
    for use in ("train", "convert", "serve"):
        assert check_model(write_model(tmp_path / "model"), use)["architectures"] == ["MiMoForCausalLM"]
