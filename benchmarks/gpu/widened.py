"""Write the policy of session B: a small model and its drafter, widened without changing what they compute.

--policy is a Hugging Face directory with a drafter and prompts.jsonl; or prompts.jsonl, drafter.safetensors and the
parts of a GGUF file, policy.gguf.00 and so on, as tools/smollm2_drafter.py writes them. Without it the quickstart's
model is made, with random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from gpu.figures import Figures
from gpu.plan import Plan
from gpu.widen import Shape, widen, widened_shape
from megatron_rlspec.commands import convert
from megatron_rlspec.models.hf_files import copy_companions, read_hf, write_hf
from megatron_rlspec.models.tensor_file import TensorFile

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = (ROOT / "examples", ROOT / "share/megatron_rlspec/examples")  # of a checkout, and of tools/offline_bundle.sh
PROMPTS = "prompts.jsonl"
DRAFTER = "drafter.safetensors"


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    narrow = _quickstart(folder) if not plan.policy else _policy(Path(plan.policy), folder)
    config, tensors = read_hf(narrow)
    wide = widened_shape(Shape.of_config(config), **asdict(plan.wide))
    if wide.heads * wide.head_size != wide.hidden:
        sizes = f"{wide.heads} heads of {wide.head_size}"
        raise ValueError(f"{sizes}: SGLang's MiMo needs as many channels as the hidden size has, {wide.hidden}")
    wide_config, widened = widen(config, tensors, wide)
    dtype = getattr(torch, plan.dtype)
    target = folder / "widened"
    typed = {name: tensor.to(dtype) for name, tensor in widened.items()}
    stated = "dtype" if "dtype" in wide_config else "torch_dtype"
    write_hf(target, wide_config | {stated: plan.dtype}, typed)
    copy_companions(narrow, target)
    repeated = _repeated(plan, (narrow / PROMPTS).read_text().splitlines())
    (folder / PROMPTS).write_text("\n".join(repeated) + "\n")
    parameters = sum(tensor.numel() for tensor in widened.values())
    kv_bytes = 2 * wide.layers * wide.kv_heads * wide.head_size * dtype.itemsize
    figures.say("parameters", parameters / 1e9, "G", f"widened from {config['hidden_size']} to {wide.hidden} channels")
    figures.say("KV cache of a token", kv_bytes / 1000, "kB")


def _quickstart(folder: Path) -> Path:
    """Make the quickstart's task and model."""
    [examples] = [path for path in EXAMPLES if path.is_dir()]
    task, model = folder / "task", folder / "narrow"
    for script, options in (("make_task.py", ["--out", task]), ("make_model.py", ["--task", task, "--out", model])):
        subprocess.run([sys.executable, examples / "quickstart" / script, *map(str, options)], check=True)
    (model / PROMPTS).write_bytes((task / "rl.jsonl").read_bytes())
    return model


def _policy(given: Path, folder: Path) -> Path:
    """Return a directory with the policy, its drafter and the prompts."""
    if (given / "config.json").exists():
        return given
    parts = sorted(given.glob("policy.gguf.*"))
    if not parts:
        raise ValueError(f"--policy {given}: neither config.json nor policy.gguf.00 is there")
    whole = folder / "policy.gguf"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    plain, fresh, narrow = folder / "plain", folder / "fresh", folder / "narrow"
    subprocess.run([sys.executable, ROOT / "tools/gguf_to_hf.py", whole, plain], check=True)
    convert.main([str(plain), str(fresh), "--add-mtp", "--to", "hf"])
    config, tensors = read_hf(fresh)
    write_hf(narrow, config, dict(tensors) | dict(TensorFile(given / DRAFTER)))
    copy_companions(fresh, narrow)
    (narrow / PROMPTS).write_bytes((given / PROMPTS).read_bytes())
    return narrow


def _repeated(plan: Plan, rows: list[str]) -> list[str]:
    """Return the prompts in the order of the steps: those of a step three times, for the three kinds of steps."""
    ordered = []
    for first in range(0, len(rows) - plan.prompts + 1, plan.prompts):
        prompts = [json.dumps(json.loads(row)) for row in rows[first : first + plan.prompts]]
        ordered += 3 * prompts
    return ordered
