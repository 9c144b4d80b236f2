"""Print what a run of examples/smollm2.sh shows: reward, drafter, speed, equal texts, and other programs that load it.

`python examples/smollm2/proof.py --run RUN_DIR` reads RUN_DIR/{warm,rl,control} and RUN_DIR/task/eval.jsonl, and writes
RUN_DIR/summary.json. Figures of one table come from the same weights, prompts and seeds. What an interrupted proof has
written there is not measured again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from megatron_rlspec import files
from megatron_rlspec.commands import compare
from megatron_rlspec.config import Config
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.tasks import data
from megatron_rlspec.types import OFF, Prompt, Sampling, SpecConfig

DRAFTERS = {"co-trained": "rl", "frozen": "warm", "control": "control"}  # name -> part of the run
BATCHES = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="directory of examples/smollm2.sh")
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts of a comparison")
    parser.add_argument("--repeats", type=int, default=10, help="interleaved pairs of a speed comparison")
    options = parser.parse_args()
    run = options.run
    config = Config.model_validate_json((run / "rl/config.json").read_text())
    tokenizer = data.load_tokenizer(run / "rl/hf")
    longest = config.model.max_length - config.rollout.max_new_tokens
    prompts, _ = data.read_prompts(run / "task/eval.jsonl", config.data, tokenizer, longest)
    prompts = prompts[: options.prompts]
    sampling = Sampling(config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)
    exact = functools.cache(lambda: engine_of(run, config, torch.float32))
    fast = functools.cache(lambda: engine_of(run, config, getattr(torch, config.model.dtype)))
    parts: dict[str, Callable[[], Any]] = {
        "conditions": conditions,
        "rewards": lambda: rewards(run),
        "drafter": lambda: curve(run / "warm"),
        "accept_lengths": lambda: drafters(run, exact(), prompts, sampling),
        "equal_texts": lambda: equal_texts(run, exact(), prompts, sampling),
    }
    for batch in BATCHES:
        measured = functools.partial(speed_of, run, fast, prompts, sampling, batch, options.repeats)
        parts[f"speed_{batch}"] = functools.partial(measured, config.rollout.engine == "embedded")
    parts |= {"transformers": lambda: transformers_answer(run), "server": lambda: server_answers(run)}
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    for name, measure in parts.items():
        if name not in summary:  # what an interrupted proof has measured stays
            summary[name] = measure()
            files.write(run / "summary.json", json.dumps(summary, indent=1) + "\n")
    print(f"written: {run / 'summary.json'}")


def conditions() -> dict:
    """Print on what machine the proof began."""
    found = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    print(f"load average {found['load']:.1f} on {found['cores']} cores; torch threads: {found['threads']}")
    return found


def engine_of(run: Path, config: Config, dtype: torch.dtype) -> EmbeddedEngine:
    hf_config, tensors = read_hf(run / "rl/hf")
    return EmbeddedEngine(
        hf_config,
        tensors.items(),
        dtype=dtype,
        max_length=config.model.max_length,
        max_total_tokens=16384,
        drafts=config.spec.drafts,
    )


def rewards(run: Path) -> dict:
    """Print the held-out reward before and after RL, with Wilson's 95 % intervals of shares."""
    found = {}
    for event in read_records(run / "rl/events.jsonl"):
        if event["kind"] == "evaluation" and "reward" in event:
            n = round(event["prompts"] - event.get("failed_rewards", 0.0))
            low, high = stats.binomtest(round(event["reward"] * n), n).proportion_ci(method="wilson")
            found[event["name"]] = compare.Estimate(event["reward"], float(low), float(high))
    for name in ("first", "last"):
        print(f"held-out reward, {name}: {found[name]}")
    return {name: vars(reward) for name, reward in found.items()}


def curve(warm: Path) -> dict:
    """Print the drafter's accept length over trained tokens, and what the curve's slope makes of ten times as many."""
    rows = []
    for event in read_records(warm / "events.jsonl"):
        if event["kind"] == "drafter" and "tokens" in event:
            rows.append([event["tokens"], *(event[f"accept_length_{k}"] for k in (1, 3, 5))])
            print(f"{event['tokens']:8} tokens: accept length at k = 1, 3, 5:", *(f"{x:.3f}" for x in rows[-1][1:]))
    later = rows[len(rows) // 3 :]
    if len(later) < 3:
        return {"curve": rows}
    fit = stats.linregress(np.log10([row[0] for row in later]), [row[2] for row in later])
    print(f"k = 3 gains {fit.slope:.3f} (standard error {fit.stderr:.3f}) with ten times the tokens, if that goes on")
    return {"curve": rows, "tenfold": [fit.slope, fit.stderr]}


def drafters(run: Path, engine: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling) -> dict:
    """Print paired accept lengths of three drafters on the final policy, at 3 drafts a round."""
    tensors = {name: read_hf(run / part / "hf")[1] for name, part in DRAFTERS.items()}
    rounds, equal = compare.measure(engine, tensors, prompts, sampling, steps=(3,))
    found = compare.table_of(rounds, len(prompts), equal)
    compare.show(found)
    return found


def equal_texts(run: Path, engine: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling) -> list[int]:
    """Print how many texts are the same with and without speculation, in float32."""
    texts = []
    for config in (SpecConfig(3), OFF):
        engine.set_config(config)
        texts.append([sample.response.tolist() for sample in compare.draw(engine, prompts, sampling, "equal", 1)])
    equal = sum(one == other for one, other in zip(*texts, strict=True))
    print(f"texts equal with and without speculation, float32: {equal} of {len(prompts)}")
    return [equal, len(prompts)]


def speed_of(
    run: Path,
    engine_of_run: Callable[[], EmbeddedEngine],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch: int,
    repeats: int,
    own_costs: bool,
) -> dict:
    """Print tokens per CPU second of the embedded engine, as the rule decides and plain; pairs of draws, in turn."""
    engine = engine_of_run()
    rule = json.loads((run / "rl/spec_rule.json").read_text())
    if "learnt" in rule and not own_costs:
        del rule["learnt"]  # durations of another engine's rounds; the first pair learns this one's
    engine.set_spec_rule(rule)
    chosen = [prompts[i % len(prompts)] for i in range(batch)]
    times = max(1, 8 // batch)
    rates: dict[str, list[float]] = {"plain": [], "spec": []}
    engine.stats()
    for repeat in range(repeats + 1):
        for name in sorted(rates, reverse=bool(repeat % 2)):
            (engine.hold if name == "plain" else lambda reason: engine.release())("timing")
            began = time.process_time()
            tokens = 0
            for part in range(times):
                samples = compare.draw(engine, chosen, sampling, name, 100 * batch + 20 * repeat + part)
                tokens += sum(len(sample.response) for sample in samples)
            if repeat:  # the first pair is a warm-up
                rates[name].append(tokens / (time.process_time() - began))
    engine.release()
    ratios = np.divide(rates["spec"], rates["plain"])
    drawn = np.random.default_rng(1).integers(0, repeats, (4000, repeats))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    rounds: dict[str, int] = {}
    for row in engine.stats():
        rounds[str(row.config)] = rounds.get(str(row.config), 0) + row.rounds
    ratio = float(np.median(ratios))
    print(
        f"batch {batch}: {np.median(rates['plain']):.0f} plain and {np.median(rates['spec']):.0f} speculating tokens "
        f"per CPU second; pairs: {ratio:.3f} [{low:.3f}, {high:.3f}]; rounds, plain ones included: {rounds}"
    )
    return {"batch": batch, "rates": rates, "ratio": [ratio, low, high], "rounds": rounds}


def server_answers(run: Path) -> str:
    """Let SGLang's own server load policy and drafter, and return what it printed."""
    command = [sys.executable, str(Path(__file__).with_name("plain_server.py")), str(run / "rl/hf")]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(text, end="")
    return text


def transformers_answer(run: Path) -> str:
    """Print what plain Transformers answers with the final policy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(run / "rl/hf")
    model = AutoModelForCausalLM.from_pretrained(run / "rl/hf", dtype=torch.float32)
    message = [{"role": "user", "content": "Ask one question about a garden."}]
    asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=32, do_sample=False)[0, asked["input_ids"].shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    print(f"Transformers ({type(model).__name__}): {message[0]['content']!r} -> {text!r}")
    return text


if __name__ == "__main__":
    main()
