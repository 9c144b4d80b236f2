"""Print what a run of examples/smollm2.sh shows: reward, drafter, speed, equal texts, and other programs that load it.

`python examples/smollm2/proof.py --run RUN_DIR` reads RUN_DIR/{warm,rl,control} and RUN_DIR/task/eval.jsonl, and writes
RUN_DIR/summary.json. Figures of one table come from the same weights, prompts and seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from megatron_rlspec import compare, data, files
from megatron_rlspec.config import Config
from megatron_rlspec.metrics import read_records
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig, SpecSchedule
from megatron_rlspec.weights.checkpoint import read_hf

DRAFTERS = {"co-trained": "rl", "frozen": "warm", "control": "control"}  # name -> part of the run
BATCHES = (1, 8, 32)
TOKENS = 256  # of one timed draw, if every answer had its longest length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="directory of examples/smollm2.sh")
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts of a comparison")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved pairs of a speed comparison")
    options = parser.parse_args()
    run = options.run
    config = Config.model_validate_json((run / "rl/config.json").read_text())
    tokenizer = data.load_tokenizer(run / "rl/hf")
    longest = config.model.max_length - config.rollout.max_new_tokens
    prompts, _ = data.read_prompts(run / "task/eval.jsonl", config.data, tokenizer, longest)
    prompts = prompts[: options.prompts]
    sampling = Sampling(config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; torch threads: {torch.get_num_threads()}")
    summary: dict = {"rewards": rewards(run), "drafter": curve(run / "warm")}
    exact = engine_of(run, config, torch.float32)
    summary["accept_lengths"] = drafters(run, exact, prompts, sampling)
    summary["equal_texts"] = equal_texts(run, exact, prompts, sampling)
    fast = engine_of(run, config, getattr(torch, config.model.dtype))
    summary["speed"] = [speed(run, fast, prompts, sampling, batch, options.repeats) for batch in BATCHES]
    summary["transformers"] = transformers_answer(run)
    files.write(run / "summary.json", json.dumps(summary, indent=1) + "\n")
    server = Path(__file__).with_name("plain_server.py")
    subprocess.run([sys.executable, str(server), str(run / "rl/hf")], check=True)
    print(f"written: {run / 'summary.json'}")


def engine_of(run: Path, config: Config, dtype: torch.dtype) -> EmbeddedEngine:
    hf_config, tensors = read_hf(run / "rl/hf")
    return EmbeddedEngine(
        hf_config, tensors.items(), dtype=dtype, max_length=config.model.max_length, max_total_tokens=16384
    )


def rewards(run: Path) -> dict:
    """Print the held-out reward before and after RL, with Wilson's 95 % intervals."""
    found = {}
    for event in read_records(run / "rl/events.jsonl"):
        if event["kind"] == "evaluation" and event["name"] in ("first", "last"):
            n = round(event["prompts"])
            interval = stats.binomtest(round(event["reward"] * n), n).proportion_ci(method="wilson")
            found[event["name"]] = [event["reward"], interval.low, interval.high]
            print(f"held-out reward, {event['name']}: {event['reward']:.3f} [{interval.low:.3f}, {interval.high:.3f}]")
    return found


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
    """Print paired accept lengths of three drafters on the final policy; then give the engine its own drafter back."""
    tensors = {name: read_hf(run / part / "hf")[1] for name, part in DRAFTERS.items()}
    found = compare.measure(engine, tensors, prompts, sampling).to_json()
    compare.show(found)
    compare.measure(engine, {"co-trained": tensors["co-trained"]}, prompts[:1], sampling, steps=(1,), version=9)
    return found


def draw(engine: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling, salt: int) -> list[tuple[int, ...]]:
    asked = [Request(f"s{salt:04d}-p{i:05d}.", prompt, 1000 * salt + i) for i, prompt in enumerate(prompts)]
    return [tuple(sample.response) for sample in engine.generate(asked, sampling)]


def equal_texts(run: Path, engine: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling) -> list[int]:
    """Print how many texts are the same with and without speculation, in float32."""
    engine.set_schedule(SpecSchedule.fixed(SpecConfig(3)))
    drafted = draw(engine, prompts, sampling, 1)
    engine.set_schedule(SpecSchedule.fixed(OFF))
    equal = sum(one == other for one, other in zip(drafted, draw(engine, prompts, sampling, 1), strict=True))
    print(f"texts equal with and without speculation, float32: {equal} of {len(prompts)}")
    return [equal, len(prompts)]


def speed(
    run: Path, engine: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling, batch: int, repeats: int
) -> dict:
    """Print tokens per CPU second, speculating as the rule decides over plain; pairs of draws, in turn."""
    engine.set_spec_rule(json.loads((run / "rl/spec_rule.json").read_text()))
    chosen = [prompts[i % len(prompts)] for i in range(batch)]
    times = max(1, TOKENS // (batch * sampling.max_new_tokens))
    rates: dict[str, list[float]] = {"plain": [], "spec": []}
    engine.stats()
    for repeat in range(repeats + 1):
        for name in sorted(rates, reverse=bool(repeat % 2)):
            (engine.hold if name == "plain" else lambda reason: engine.release())("timing")
            began = time.process_time()
            tokens = 0
            for part in range(times):
                tokens += sum(map(len, draw(engine, chosen, sampling, 100 * batch + 20 * repeat + part)))
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
