"""Measure tokens per CPU second of both engines, plain and with drafts, and against another state of this repository.

    python benchmarks/decode.py [--quick] [--json FILE] [--before TREE] [--engines embedded,sglang] [--dtype bfloat16]

The models have random weights: one of SmolLM2-135M's shape (30 layers of 576, 49,152 words) and a tiny one. Their
drafters agree with the target about as often as a trained one. With --before, a work tree of another commit, both trees
decode in turn within each repetition, and the last column is the ratio of their rates: the median over repetitions with
the 5 % and 95 % quantiles of its bootstrap. CPU seconds are those of the engine's processes, the HTTP server and this
client included, so that other work on the machine matters little. Each engine has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from bigram_model import checkpoint
from synthetic import conditions

from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.types import Prompt, Request, Sampling, SpecConfig

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "hidden": 64},
    "smollm2": {"layers": 30, "hidden": 576, "vocab": 49152, "heads": 9, "kv": 3, "ffn": 1536},
}
SERVE = "--device cpu --spec adaptive --num-steps 3 --candidate-steps 0,3 --max-running-requests 32"


def engine_of(kind: str, model: Path, dtype: str, folder: str) -> Any:
    """Start an engine on a model directory."""
    if kind == "embedded":
        from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine

        config, tensors = read_hf(model)
        wanted = getattr(torch, dtype)
        return EmbeddedEngine(config, tensors.items(), dtype=wanted, max_length=512, max_total_tokens=16384)
    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.rollout.sglang.client.launcher import launch

    serve = [*SERVE.split(), "--dtype", dtype, "--max-total-tokens", "16384"]
    return SGLangEngine.of(launch(model, Path(folder) / "serve.log", arguments=serve).wait())


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all that it started."""
    started = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in started)


def work(kind: str, model: Path, dtype: str) -> None:
    """Decode what each line of standard input asks for, and answer with a line of figures."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print goes to standard error
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(kind, model, dtype, folder)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            batch, steps, seed, tokens, least = json.loads(line)
            rng = np.random.default_rng(seed)
            prompts = [Prompt(i, rng.integers(0, vocab, 32)) for i in range(batch)]
            wanted = [Request(f"{i}.", prompt, seed * 1000 + i) for i, prompt in enumerate(prompts)]
            engine.set_config(SpecConfig.of(steps))
            engine.stats()
            took = runs = 0.0
            while took < least:  # the clock of child processes counts hundredths of a second
                began = cpu_seconds()
                samples = engine.generate(wanted, Sampling(0.7, max_new_tokens=tokens, ignore_eos=True))
                took += cpu_seconds() - began
                runs += 1
            text = zlib.crc32(np.concatenate([sample.tokens for sample in samples]).tobytes())
            accepted = np.sum([np.pad(s.accepted, (0, 8 - len(s.accepted))) for s in engine.stats()], 0)
            per_round = float(accepted @ np.arange(1, 9) / accepted.sum())
            print(json.dumps([runs * batch * tokens / took, per_round, text]), file=answers, flush=True)
        engine.close()


class Worker:
    """An engine of one work tree in a process of its own."""

    def __init__(self, tree: Path, kind: str, model: Path, dtype: str) -> None:
        command = [sys.executable, __file__, "--worker", kind, "--model", str(model), "--dtype", dtype]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, line: str = "") -> str:
        assert self.process.stdin and self.process.stdout
        if line:
            print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the worker ended: {' '.join(map(str, self.process.args))}")
        return answer

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def ratio(pairs: np.ndarray) -> tuple[float, float, float]:
    """Return the median of the ratios [repetitions], and the 5 % and 95 % quantiles of its bootstrap."""
    draws = np.median(np.random.default_rng(0).choice(pairs, (2000, len(pairs))), 1)
    return float(np.median(pairs)), *map(float, np.quantile(draws, [0.05, 0.95]))


def compare(kind: str, shape: str, model: Path, options: argparse.Namespace, show: Callable) -> list[dict[str, Any]]:
    """Measure one engine at one size, in all trees."""
    trees = {"now": Path(__file__).parent.parent} | ({"before": options.before} if options.before else {})
    workers = {name: Worker(tree, kind, model, options.dtype) for name, tree in trees.items()}
    for worker in workers.values():
        worker.ask()
    rows = []
    for batch in options.batches:
        for steps in (0, 3):
            rates: dict[str, list[float]] = {name: [] for name in workers}
            texts: dict[str, list[int]] = {name: [] for name in workers}
            for repetition in range(options.repetitions + 1):  # the first is a warm-up
                for name, worker in workers.items():
                    asked = json.dumps([batch, steps, repetition, options.tokens, 0.5 if repetition else 0.01])
                    rate, per_round, text = json.loads(worker.ask(asked))
                    rates[name] += [rate] if repetition else []
                    texts[name].append(text)
            row = {"engine": kind, "model": shape, "batch": batch, "steps": steps, "per_round": per_round}
            row |= {name: float(np.median(found)) for name, found in rates.items()}
            if options.before:
                row["ratio"] = ratio(np.array(rates["now"]) / rates["before"])
                row["equal_texts"] = sum(a == b for a, b in zip(*texts.values(), strict=True)) / len(texts["now"])
            rows.append(row)
            show(row)
    for worker in workers.values():
        worker.close()
    return rows


def show(row: dict[str, Any]) -> None:
    compared = ""
    if "ratio" in row:
        middle, low, high = row["ratio"]
        compared = f"{row['before']:8.1f}  {middle:5.2f} [{low:.2f}, {high:.2f}]  {row['equal_texts']:.0%}"
    names = f"{row['engine']:8s} {row['model']:8s} {row['batch']:5d} {row['steps']:6d} {row['per_round']:10.2f}"
    print(f"{names} {row['now']:8.1f} {compared}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and tokens")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--before", type=Path, help="a work tree of the commit to compare with")
    parser.add_argument("--engines", default="embedded,sglang", help="among embedded,sglang")
    parser.add_argument("--models", default="tiny,smollm2", help="among tiny,smollm2")
    parser.add_argument("--batches", default="1,8,32", help="samples at once")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.dtype)
        return
    options.batches = [int(batch) for batch in options.batches.split(",")]
    options.repetitions, options.tokens = (3, 16) if options.quick else (7, 32)
    about = conditions(dtype=options.dtype, tokens=options.tokens, repetitions=options.repetitions)
    print("conditions:", ", ".join(f"{name} {value}" for name, value in about.items()))
    print("engine   model    batch drafts  per round      now   before  now / before         equal texts")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.models.split(","):
            config, tensors = checkpoint(8.0, **SHAPES[shape])
            write_hf(Path(folder) / shape, config, tensors)
            for kind in options.engines.split(","):
                rows += compare(kind, shape, Path(folder) / shape, options, show)
    if options.json:
        options.json.write_text(json.dumps({"conditions": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
