"""Compare the embedded engine with Hugging Face `generate` and SGLang on a CPU, and tree budgets with fixed trees.

    python benchmarks/embedded.py [--quick] [--json FILE] [--parts huggingface,sglang,trees,selection]

huggingface  the same weights, prompts and machine, sampling at temperature 1: plain generation at batch 1, 8 and 64,
             and assisted generation at batch 1, with an assistant of the drafter's acceptance
sglang       SGLang's own engine on the CPU (float32, over HTTP), without and with the drafter
trees        one n per round (RLHFSpec) against the best fixed n, over acceptance and batch: tokens per verified token,
             tokens per second
selection    RLHFSpec's table 1: the throughput of its selection as a share of the best fixed n in 2 to 48, by samples

The models are random. Each target is nearly a bigram model, and its drafter computes the bigram part exactly, so the
sharpness of the output distribution sets the acceptance. Every layer is computed in full. Cost and acceptance are
fitted on other prompts and seeds than those that score the budgets. All contestants of a row run in turn, in one
process, on one thread. Ratios are medians over medians with the 5 % and 95 % quantiles of their bootstrap. Texts of the
embedded engine must be identical in every row. These are CPU figures: on a CPU each verified token costs time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bigram_model import VOCAB, checkpoint

from megatron_rlspec.extensions.trees.tree import AcceptanceMap, TreeBudget, VerifyCost
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.acceptance import top
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig, SpecSchedule

PROMPT = 32
SHARPNESS = {"low": 3.0, "middling": 6.0, "high": 16.0}
TREE = SpecConfig(num_steps=5, topk=4, num_draft_tokens=49)
FIXED = (2, 4, 6, 8, 12, 16, 24, 32, 48)


class FixedTree:
    """Verify the n best candidates of each sample, and record which were accepted."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.scores = []
        self.accepted = []

    def keep(self, scores: np.ndarray, depth: np.ndarray, context_tokens: int, limit: int) -> np.ndarray:
        return top(scores, min(self.n, limit))

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        self.scores.append(scores)
        self.accepted.append(accepted)

    def timed(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        pass


class Contestant:
    """Run one embedded engine under one configuration."""

    def __init__(self, model: tuple[dict, dict], spec: SpecConfig, tokens: int, budget: Any = None) -> None:
        config, tensors = model
        self.engine = EmbeddedEngine(
            config,
            tensors.items(),
            schedule=SpecSchedule.fixed(spec),
            budget=budget,
            max_running_requests=64,
            max_total_tokens=64 * (PROMPT + tokens + 80),
            max_length=PROMPT + tokens + 1,
            max_draft_tokens=max(64, spec.num_draft_tokens),
        )
        self.sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        self.verified = self.committed = 0

    def __call__(self, requests: Sequence[Request]) -> list[list[int]]:
        before = self.engine.rounds.verified
        samples = self.engine.generate(requests, self.sampling)
        self.verified += self.engine.rounds.verified - before
        self.committed += sum(len(s.response) for s in samples)
        return [s.response.tolist() for s in samples]

    def tokens_per_round(self) -> float:
        """Return accepted drafts plus one, per sample and round, since the last call."""
        stats = self.engine.stats()
        rounds = sum(sum(s.accepted) for s in stats)
        return sum((i + 1) * n for s in stats for i, n in enumerate(s.accepted)) / rounds


def requests(batch: int, seed: int) -> list[Request]:
    """Draw `batch` random prompts of `PROMPT` tokens, with seeds of their own."""
    rng = np.random.default_rng(seed)
    return [Request(f"{i:02d}.", Prompt(i, rng.integers(0, VOCAB, PROMPT)), seed * 1000 + i) for i in range(batch)]


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Measure the seconds of one call. Return them and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def in_turn(calls: dict[str, Callable[[int], Any]], repetitions: int, same: Sequence[str]) -> dict[str, np.ndarray]:
    """Measure seconds [repetitions] of each call, which gets the repetition's number; results of `same` must agree."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(-1, repetitions):  # the first is a warm-up
        results = {}
        for name, call in calls.items():
            taken, results[name] = seconds(lambda: call(repetition + 1))  # noqa: B023
            if repetition >= 0:
                times[name].append(taken)
        if any(results[name] != results[same[0]] for name in same):
            raise SystemExit(f"texts differ between {', '.join(same)}")
    return {name: np.array(taken) for name, taken in times.items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> tuple[float, float, float]:
    """Compute median(slow) / median(fast), and the 5 % and 95 % quantiles of its bootstrap."""
    rng = np.random.default_rng(0)
    pick = rng.integers(0, len(slow), (2, 2000, len(slow)))
    spread = np.median(slow[pick[0]], 1) / np.median(fast[pick[1]], 1)
    return float(np.median(slow) / np.median(fast)), *map(float, np.quantile(spread, [0.05, 0.95]))


def shown(found: tuple[float, float, float]) -> str:
    return f"{found[0]:5.2f} [{found[1]:.2f}, {found[2]:.2f}]"


# -- parts


def huggingface(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare with Hugging Face's plain and assisted generation."""
    import transformers

    transformers.logging.set_verbosity_error()
    config, tensors = model = checkpoint(SHARPNESS["high"], options.layers, options.hidden)

    def qwen(layers: int, state: dict[str, torch.Tensor]) -> Any:
        made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config | {"num_hidden_layers": layers})).eval()
        missing, _ = made.load_state_dict(state, strict=False)
        assert not missing, missing
        return made

    target = qwen(options.layers, {k: v for k, v in tensors.items() if "mtp" not in k})
    first = {k: v for k, v in tensors.items() if "mtp" not in k and not k.startswith("model.layers.")}
    layer = {k: v for k, v in tensors.items() if k.startswith("model.layers.0.")}
    silent = {k: torch.zeros_like(v) if "o_proj" in k or "down_proj" in k else v for k, v in layer.items()}
    assistant = qwen(1, first | silent)  # the bigram part alone
    assistant.generation_config.num_assistant_tokens = options.steps
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def generate(wanted: list[Request], **more: Any) -> None:
        ids = torch.from_numpy(np.stack([r.prompt.tokens for r in wanted]))
        tokens = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **tokens, **more
        )
        assert out.shape[1] == PROMPT + options.tokens

    rows = []
    print(f"\nHugging Face, {options.layers} layers of {options.hidden}, {options.tokens} tokens each, temperature 1")
    print("batch  contestant        tokens/s  tokens per round  × plain HF            × assisted HF")
    for batch in (1, 8, 64):
        ours = {"embedded off": Contestant(model, OFF, options.tokens)}
        ours |= {f"embedded k{k}": Contestant(model, SpecConfig(k), options.tokens) for k in (3, options.steps)}
        calls: dict[str, Callable[[int], Any]] = {"HF": lambda r, b=batch: generate(requests(b, r))}
        if batch == 1:
            calls["HF assisted"] = lambda r: generate(requests(1, r), assistant_model=assistant)
        calls |= {n: lambda r, c=c, b=batch: c(requests(b, r)) for n, c in ours.items()}
        times = in_turn(calls, options.repetitions, tuple(ours))
        for name, taken in times.items():
            row = {"part": "huggingface", "batch": batch, "contestant": name}
            row["tokens_per_second"] = batch * options.tokens / float(np.median(taken))
            row["tokens_per_round"] = ours[name].tokens_per_round() if name in ours else None
            row["over_hf"] = ratio(times["HF"], taken)
            row["over_assisted"] = ratio(times["HF assisted"], taken) if batch == 1 else None
            rows.append(row)
            rounds = f"{row['tokens_per_round']:.2f}" if row["tokens_per_round"] else "-"
            assisted = shown(row["over_assisted"]) if batch == 1 else ""
            print(
                f"{batch:5d}  {name:16s} {row['tokens_per_second']:9.0f}  {rounds:>16s}  {shown(row['over_hf']):20s}  "
                f"{assisted}"
            )
    return rows


def sglang(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare with SGLang's engine on the CPU, without and with drafts."""
    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.rollout.sglang.client.launcher import launch

    model = checkpoint(SHARPNESS["high"], options.layers, options.hidden)
    steps = options.steps
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_hf(Path(folder) / "model", *model)
        serve = f"--device cpu --dtype float32 --spec adaptive --candidate-steps 0,{steps} --num-steps {steps}"
        serve += " --max-running-requests 64 --max-total-tokens 16384"
        process = launch(Path(folder) / "model", Path(folder) / "log", arguments=serve.split())
        try:
            theirs = SGLangEngine.of(process.wait(), timeout=300)
            print(f"\nSGLang on the CPU, {options.layers} layers of {options.hidden}")
            print("batch  contestant        tokens/s  × SGLang, same configuration")
            for batch in (1, 8, 64):
                calls = {}
                sampling = Sampling(max_new_tokens=options.tokens, ignore_eos=True)
                for spec in (OFF, SpecConfig(steps)):
                    ours = Contestant(model, spec, options.tokens)

                    def served(r: int, spec: SpecConfig = spec, batch: int = batch) -> None:
                        theirs.set_schedule(SpecSchedule.fixed(spec))
                        theirs.generate(requests(batch, r), sampling)  # noqa: B023

                    calls[f"SGLang {spec}"] = served
                    calls[f"embedded {spec}"] = lambda r, c=ours, b=batch: c(requests(b, r))
                same = tuple(name for name in calls if name.startswith("embedded"))
                times = in_turn(calls, options.repetitions, same)
                for name, taken in times.items():
                    row = {"part": "sglang", "batch": batch, "contestant": name}
                    row["tokens_per_second"] = batch * options.tokens / float(np.median(taken))
                    row["over_sglang"] = ratio(times["SGLang " + name.split()[1]], taken)
                    rows.append(row)
                    print(f"{batch:5d}  {name:16s} {row['tokens_per_second']:9.0f}  {shown(row['over_sglang'])}")
        finally:
            process.close()
    return rows


def profile(model: tuple[dict, dict], options: argparse.Namespace) -> tuple[VerifyCost, AcceptanceMap]:
    """Fit cost and acceptance of trees to rounds of fixed trees, on prompts that nothing else uses."""
    rounds = []
    acceptance = AcceptanceMap(window=1e9)
    for n in FIXED[:: 1 if not options.quick else 3]:
        budget = FixedTree(n)
        contestant = Contestant(model, TREE, options.tree_tokens, budget)
        for batch in (4, 16, 64) if options.quick else (4, 8, 16, 32, 64):
            contestant(requests(batch, 900_000 + batch))
            contestant.engine.stats()
            contestant(requests(batch, 910_000 + batch))
            for s in contestant.engine.stats():
                if s.rounds >= 4:
                    rounds.append((s.batch, s.context_tokens, s.batch * (n + 1), s.ms / s.rounds))
        acceptance.observe(np.concatenate(budget.scores), np.concatenate(budget.accepted))
    return VerifyCost.fit(rounds), acceptance


def scored(model: tuple[dict, dict], batch: int, fixed: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Measure times and verified tokens of every fixed n, and of one n per round."""
    cost, acceptance = model_profile(model, options)
    contestants = {f"n = {n}": Contestant(model, TREE, options.tree_tokens, FixedTree(n)) for n in fixed}
    budget = TreeBudget(cost, copy.deepcopy(acceptance))
    contestants["one n per round"] = Contestant(model, TREE, options.tree_tokens, budget)
    contestants["off"] = Contestant(model, OFF, options.tree_tokens)
    calls = {n: lambda r, c=c: c(requests(batch, 10 * batch + r)) for n, c in contestants.items()}
    times = in_turn(calls, options.tree_repetitions, tuple(contestants))
    best = min((f"n = {n}" for n in fixed), key=lambda name: float(np.median(times[name])))
    return {"times": times, "best": best, "contestants": contestants}


_PROFILES: dict[int, tuple[VerifyCost, AcceptanceMap]] = {}


def model_profile(model: tuple[dict, dict], options: argparse.Namespace) -> tuple[VerifyCost, AcceptanceMap]:
    """Return the profile of a model; fit it at the first call."""
    if id(model) not in _PROFILES:
        _PROFILES[id(model)] = profile(model, options)
    return _PROFILES[id(model)]


def trees(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare budgets with the best fixed n, over acceptance and batch."""
    rows = []
    print(f"\nTrees of {TREE.num_steps} steps and {TREE.topk} branches, {options.layers} layers of {options.hidden}")
    print("acceptance  batch  contestant             tokens/s  per round  per verified token  × best fixed n")
    for level, sharpness in SHARPNESS.items():
        model = checkpoint(sharpness, options.layers, options.hidden)
        for batch in (8, 32) if options.quick else (1, 8, 64):
            found = scored(model, batch, FIXED[::3] if options.quick else FIXED, options)
            for name in (found["best"], "one n per round", "off"):
                taken = found["times"][name]
                contestant = found["contestants"][name]
                row = {"part": "trees", "acceptance": level, "batch": batch, "contestant": name}
                row["tokens_per_second"] = batch * options.tree_tokens / float(np.median(taken))
                row["tokens_per_round"] = contestant.tokens_per_round()
                row["tokens_per_verified"] = contestant.committed / contestant.verified
                row["over_best_fixed"] = ratio(found["times"][found["best"]], taken)
                rows.append(row)
                speed = row["tokens_per_second"]
                tokens = row["tokens_per_round"]
                print(
                    f"{level:10s}  {batch:5d}  {name:20s} {speed:10.0f} {tokens:10.2f}  "
                    f"{row['tokens_per_verified']:18.2f}  {shown(row['over_best_fixed'])}"
                )
    return rows


def selection(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure RLHFSpec's table 1: its selection as a share of the best fixed n, by samples."""
    rows = []
    model = checkpoint(SHARPNESS["middling"], options.layers, options.hidden)
    print("\nSelection as a share of the best fixed n (RLHFSpec's table 1: 95.5 % to 99.9 % on their GPUs)")
    print("samples  best fixed n  one n per round")
    for samples in (8, 32, 64) if options.quick else (8, 16, 32, 48, 64):
        found = scored(model, samples, FIXED[::3] if options.quick else FIXED, options)
        times = found["times"]
        row = {"part": "selection", "samples": samples, "best": found["best"]}
        row["one n per round"] = ratio(times[found["best"]], times["one n per round"])
        rows.append(row)
        print(f"{samples:7d}  {found['best']:12s}  {shown(row['one n per round'])}")
    return rows


PARTS = {"huggingface": huggingface, "sglang": sglang, "trees": trees, "selection": selection}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="fewer repetitions and points")
    p.add_argument("--json", type=Path, help="write the rows to this file")
    p.add_argument("--parts", default=",".join(PARTS), help=f"among {','.join(PARTS)}")
    p.add_argument("--layers", type=int, default=16, help="layers of the target; many, so that depth costs time")
    p.add_argument("--hidden", type=int, default=32, help="width of the model")
    p.add_argument("--steps", type=int, default=7, help="drafter passes of chains")
    options = p.parse_args()
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        p.error(f"--parts: unknown {', '.join(sorted(unknown))}; expected among {', '.join(PARTS)}")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    options.repetitions, options.tree_repetitions = (3, 3) if options.quick else (9, 5)
    options.tokens, options.tree_tokens = (32, 32) if options.quick else (96, 64)
    conditions = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread",
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "layers": options.layers,
        "hidden": options.hidden,
        "vocab": VOCAB,
        "repetitions": options.repetitions,
    }
    print("conditions:", ", ".join(f"{k} {v}" for k, v in conditions.items()))
    rows = []
    for part in options.parts.split(","):
        rows += PARTS[part](options)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
