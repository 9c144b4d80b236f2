"""Record the command lines of recipes: each script runs with stubs, which record what it would start.

A script finds only the harmless programs of `TOOLS`. Programs that would start or end something are stubs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rlspec.conversion.drafter_files import config_of_drafter
from megatron_rlspec.integrations.slime import launch
from megatron_rlspec.integrations.slime.flags import DRAFT_MODEL, read_flags

TOOLS = ("awk", "basename", "bash", "cat", "dirname", "grep", "seq", "tr", "wc")
SILENT = ("hf", "mkdir", "nvidia-smi", "pip", "pkill", "sleep", "ssh")
RECORDING = ("ray", "rlspec")
_RECORD = """#!{python}
import json, os, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], dict(os.environ)]) + chr(10))
"""
# The model of a recipe, by a part of its name: `model_type` and architecture of its config.json.
MODELS = {
    "mimo": ("mimo", "MiMoForCausalLM"),
    "glm5": ("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "glm4.7-30B": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "glm": ("glm4_moe", "Glm4MoeForCausalLM"),
    "deepseek": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "qwen3-next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3.5": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3-8b": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2.5": ("qwen2", "Qwen2ForCausalLM"),
}
# Megatron's flag -> the key of config.json that slime compares it with, or that SGLang needs.
SIZES = {
    "--hidden-size": "hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-layers": "num_hidden_layers",
    "--ffn-hidden-size": "intermediate_size",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocab_size",
    "--num-experts": "num_experts",
    "--moe-router-topk": "num_experts_per_tok",
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_nope_head_dim",
    "--qk-pos-emb-head-dim": "qk_rope_head_dim",
    "--v-head-dim": "v_head_dim",
}


UNTIED = "--untie-embeddings-and-output-weights"
INFINIBAND = "--sglang-disaggregation-ib-device"


class Job(NamedTuple):
    """A job that a command starts on all nodes: slime's arguments, and the environment of Ray's workers."""

    arguments: list[str]
    environment: dict[str, str]


def run(script: Path, sandbox: Path, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of the last call of a recorded program."""
    programs = sandbox / "bin"
    programs.mkdir(parents=True)
    for name in TOOLS:
        (programs / name).symlink_to(str(shutil.which(name)))
    stubs = dict.fromkeys(SILENT, "#!/bin/sh\n") | {"mktemp": f"#!/bin/sh\necho {sandbox}/made\n"}
    stubs |= dict.fromkeys(RECORDING, _RECORD.format(python=sys.executable, calls=str(sandbox / "calls")))
    for name, text in stubs.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    given = {"PATH": str(programs), "HOME": str(sandbox), "MASTER_ADDR": "127.0.0.1", **environment}
    bash = str(shutil.which("bash"))
    done = subprocess.run([bash, str(script)], env=given, cwd=sandbox, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    arguments, seen = json.loads((sandbox / "calls").read_text().splitlines()[-1])
    return arguments, seen


def job(command: list[str], seen: dict[str, str]) -> Job:
    """Return what a command line, `ray job submit …` or `python3 train.py …`, starts with this environment."""
    runtime = read_flags(command).get("--runtime-env-json")
    if runtime is None:
        runtime = json.dumps(json.loads(seen[launch.RAY_JOB])["runtime_env"])
    return Job(command[launch.driver_index(command) + 1 :], json.loads(runtime)["env_vars"])


def with_model(started: Job, recipe: str, folder: Path) -> Job:
    """Point the arguments at a config.json in `folder` with the sizes of the recipe's own flags.

    InfiniBand devices, which SGLang looks for on the machine, are left out.
    """
    folder.mkdir(exist_ok=True)
    arguments = list(started.arguments)
    if INFINIBAND in arguments:
        at = arguments.index(INFINIBAND)
        del arguments[at : at + 2]
    for flag in ("--hf-checkpoint", "--ref-load", "--load"):
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = str(folder)
    config = _config(recipe, read_flags(arguments))
    (folder / "config.json").write_text(json.dumps(config))
    if DRAFT_MODEL in arguments:
        (folder / "drafter").mkdir(exist_ok=True)
        (folder / "drafter/config.json").write_text(json.dumps(config_of_drafter(config, 32000)))
        arguments[arguments.index(DRAFT_MODEL) + 1] = str(folder / "drafter")
    (folder / "configuration_mimo.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = 'mimo'\n"
    )
    return Job(arguments, started.environment)


def _config(recipe: str, given: dict[str, str | None]) -> dict[str, Any]:
    kind, architecture = next(model for part, model in MODELS.items() if part in recipe)
    theta = int(given["--rotary-base"] or 0)
    config: dict[str, Any] = {key: int(given[flag] or 0) for flag, key in SIZES.items() if flag in given}
    config |= {"rms_norm_eps": float(given.get("--norm-epsilon") or 1e-5), "tie_word_embeddings": UNTIED not in given}
    config |= {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    config |= {"max_position_embeddings": 131072, "hidden_act": "silu", "num_nextn_predict_layers": 1}
    if experts := config.get("num_experts"):
        config |= {"n_routed_experts": experts, "n_shared_experts": 1, "first_k_dense_replace": 3}
    if kind == "mimo":
        config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    if kind == "glm_moe_dsa":
        config |= {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
    if kind.startswith("qwen3_5"):
        config = {"text_config": config | {"model_type": f"{kind}_text"}, "vision_config": {"model_type": kind}}
    return config | {"model_type": kind, "architectures": [architecture], "torch_dtype": "bfloat16"}
