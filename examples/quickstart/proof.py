"""Print the quickstart's closing tables: what RL, co-training and speculation gained.

`python examples/quickstart/proof.py --run RUN_DIR` reads RUN_DIR/{warm,rl,control,upper}, starts two engines on the
final policy, one that speculates and one launched without speculation. It writes RUN_DIR/summary.json.
All comparisons use the same weights, prompts and seeds. Accept lengths are compared in pairs (`rlspec compare`), and
the engines run in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor

from megatron_rlspec import config as configuration
from megatron_rlspec import files
from megatron_rlspec.commands import compare
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.tasks import data
from megatron_rlspec.types import OFF, SHARPNESS, Prompt, Sampling, SpecConfig

CONSOLE = Console()
DRAFTERS = {"co-trained": "rl", "frozen": "warm", "control": "control", "upper bound": "upper"}  # -> part of the run
STEPS = (3, 5)
FEW = 4  # requests of the long tail
ENDS = ("first", "last")  # evaluations of the run
POLICY = {  # of the last step; a run of fewer steps than train.drift_every has no drift
    "drift/kl": "KL(policy, warm start) per token",
    "drift/changed": "share of likeliest tokens that changed",
    "policy/entropy": "entropy per token",
}
LIKELIEST = 100.0  # sharpness at which coupled drafts are the likeliest tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="directory of examples/quickstart.sh")
    parser.add_argument("--prompts", type=int, default=256, help="prompts on which accept lengths are compared")
    parser.add_argument("--repeats", type=int, default=4, help="interleaved repetitions of the speed comparisons")
    args = parser.parse_args()
    run = args.run
    settings = configuration.Config.model_validate_json((run / "rl/config.json").read_text())
    tokenizer = data.load_tokenizer(run / "rl/hf")
    prompts, _ = data.read_prompts(run / "task/eval.jsonl", settings.data, tokenizer, settings.model.max_length)
    sampling = Sampling(settings.rollout.temperature, max_new_tokens=settings.rollout.max_new_tokens)
    steps = ",".join(map(str, settings.spec.candidate_steps))
    shared = ["--dtype", settings.model.dtype, "--verifier", settings.spec.verifier]
    speculating = ["--spec", "adaptive", "--num-steps", str(settings.spec.num_steps), "--candidate-steps", steps]
    drafters = {name: read_hf(run / part / "hf")[1] for name, part in DRAFTERS.items()}
    with (
        launch(run / "rl/hf", run / "proof/speculating.log", arguments=shared + speculating) as fast,
        launch(run / "rl/hf", run / "proof/plain.log", arguments=[*shared, "--spec", "off"]) as slow,
    ):
        with told("starting a speculating and a plain engine"):
            spec, plain = SGLangEngine.of(fast.wait()), SGLangEngine.of(slow.wait())
            engines = {"spec": (spec, fast), "plain": (plain, slow)}
        summary = rewards(run) | times(run) | predictions(run) | {"policy": policy(run)}
        with told("accept lengths of four drafters on the final policy's rollouts"):
            compared = prompts[: args.prompts]
            found, equal_texts = compare.measure(spec, drafters, compared, sampling, STEPS)
            summary["comparison"] = compare.table_of(found, len(compared), equal_texts)
        with told("the same with drafts of the likeliest tokens"):
            spec.set_config(OFF, LIKELIEST)
            trained = {"co-trained": drafters["co-trained"]}
            other, _ = compare.measure(spec, trained, compared, sampling, STEPS, version=2 + len(drafters))
            spec.set_config(OFF, SHARPNESS[0])
            summary["coupled"] = coupled(found, other)
        longest = sorted(prompts, key=lambda prompt: -len(prompt.tokens))[:FEW]
        with told("tokens per second, engines and drafters in turn"):
            three = {name: drafters[name] for name in ("co-trained", "frozen", "control")}
            summary["long_tail"] = speeds(engines, three, longest, sampling, args.repeats)
            spec.set_spec_rule(json.loads((run / "rl/spec_rule.json").read_text()))
            summary["rollout"] = speeds(engines, trained, prompts[:96], sampling, args.repeats, fixed=False)
    files.write(run / "summary.json", json.dumps(summary, indent=1) + "\n")
    show(summary)
    CONSOLE.print(f"written: {run / 'summary.json'}. The run's page: .venv/bin/rlspec report {run / 'rl'}")


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print what begins, and how long it took."""
    began = time.perf_counter()
    CONSOLE.print(f"{what} ...")
    yield
    CONSOLE.print(f"    {time.perf_counter() - began:.0f} s")


def policy(run: Path) -> dict[str, float]:
    """Read how far the policy has moved: the newest recorded values of `POLICY`."""
    found: dict[str, float] = {}
    for record in read_records(run / "rl/metrics.jsonl"):
        found |= {name: record[name] for name in POLICY if name in record}
    return found


def rewards(run: Path) -> dict:
    """Read the held-out reward before the first and after the last step, with Wilson's 95 % interval of a share."""
    found: dict = {}
    for event in read_records(run / "rl/events.jsonl"):
        if event["kind"] == "evaluation" and "reward" in event:
            name, n = event["name"], round(event["prompts"] - event.get("failed_rewards", 0.0))
            low, high = stats.binomtest(round(event["reward"] * n), n).proportion_ci(method="wilson")
            found |= {f"reward_{name}": event["reward"], f"reward_{name}_interval": [float(low), float(high)]}
    return found


def times(run: Path) -> dict:
    """Sum the seconds of all RL steps, by part."""
    records = read_records(run / "rl/metrics.jsonl")
    parts = ("seconds_generate", "seconds_push", "seconds_train")
    return {part: sum(record[part] for record in records) for part in parts} | {"steps": len(records)}


def predictions(run: Path) -> dict:
    """Compute the mean absolute error of the training steps' predictions of the next rollout's tokens per round."""
    records = read_records(run / "rl/metrics.jsonl")
    scored = [r for r in records if "predict/error" in r and "predict/last_value_error" in r]
    if not scored:
        return {}
    return {
        "predicted_steps": len(scored),
        "prediction_error": float(np.mean([abs(r["predict/error"]) for r in scored])),
        "last_value_error": float(np.mean([abs(r["predict/last_value_error"]) for r in scored])),
        "trainer_error": float(
            np.mean([abs(r["predict/trainer_tokens"] - r["predict/observed_tokens"]) for r in scored])
        ),
    }


def coupled(found: compare.Rounds, likeliest: compare.Rounds) -> list[dict]:
    """Return how many more tokens a round of coupled drafts yields than one of the drafter's likeliest tokens."""
    rows = []
    for k in STEPS:
        gain = compare.estimate(found[k]["co-trained"], likeliest[k]["co-trained"])
        rows.append({"steps": k, **vars(gain), "shown": gain.shown})
    return rows


def speeds(
    engines: Mapping[str, tuple[SGLangEngine, EngineProcess]],
    drafters: Mapping[str, Mapping[str, Tensor]],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    repeats: int,
    *,
    fixed: bool = True,
) -> dict:
    """Measure tokens per second of the plain engine and, with each drafter, of the other one, in turn.

    `fixed`: the most drafts a round, always; otherwise the engine's rule decides. A ratio is taken within one
    repetition; the result holds the median and the range of these ratios, and the median by the engines' CPU time,
    which a busy machine disturbs less.
    """
    rates: dict[str, list[float]] = {name: [] for name in ("plain", *drafters)}
    by_cpu: dict[str, list[float]] = {name: [] for name in rates}
    spec = engines["spec"][0]
    if fixed:
        spec.set_config(SpecConfig(max(STEPS)))
    version = 1000 + len(prompts) * 10
    for repeat in range(repeats + 1):
        order = list(rates) if repeat % 2 else list(rates)[::-1]
        for name in order:
            if name != "plain":
                version += 1
                drafter = [(key, drafters[name][key]) for key in drafters[name] if ".mtp_layers." in key]
                spec.update_weights(version, drafter, scope="drafter")
            engine, process = engines["plain" if name == "plain" else "spec"]
            began = time.perf_counter()
            cpu_began = cpu_seconds(process)
            tokens = 0
            for part in range(2):
                salt = 2 * (10 + repeat) + part
                tokens += sum(len(s.response) for s in compare.draw(engine, prompts, sampling, name, salt))
            if repeat:  # the first repetition is a warm-up
                rates[name].append(tokens / (time.perf_counter() - began))
                by_cpu[name].append(tokens / (cpu_seconds(process) - cpu_began))
        CONSOLE.print(f"    {len(prompts)} at once, round {repeat} of {repeats}")
    found: dict = {"batch": len(prompts), "repeats": repeats, "plain": float(np.median(rates["plain"])), "drafters": {}}
    for name in drafters:
        ratios = np.divide(rates[name], rates["plain"])
        found["drafters"][name] = {
            "tokens_per_s": float(np.median(rates[name])),
            "speedup": float(np.median(ratios)),
            "range": [float(ratios.min()), float(ratios.max())],
            "speedup_by_cpu": float(np.median(np.divide(by_cpu[name], by_cpu["plain"]))),
        }
    return found


def cpu_seconds(engine: EngineProcess) -> float:
    """Sum the CPU seconds of an engine's processes."""
    first = psutil.Process(engine.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (first, *first.children(recursive=True)))


def show(summary: dict) -> None:
    """Print the closing tables: of the policy, of the drafters on it, and of speeds. They fit into 80 columns."""
    first, last = (f"{summary[f'reward_{at}']:.3f} {interval(summary[f'reward_{at}_interval'])}" for at in ENDS)
    moved = summary["policy"]
    rows = [["held-out reward, first", first], ["held-out reward, last", last]]
    rows += [[text, f"{moved[key]:.3f}"] for key, text in POLICY.items() if key in moved]
    if "prediction_error" in summary:
        rows.append(["tokens a round, predicted one step ahead: error", f"{summary['prediction_error']:.3f}"])
        rows.append(["the same from the last rollout's rates", f"{summary['last_value_error']:.3f}"])
    seconds = [f"{summary[f'seconds_{part}']:.0f}" for part in ("generate", "push", "train")]
    rows.append(["seconds of all steps: generate, push, train", ", ".join(seconds)])
    table(f"After {summary['steps']} GRPO steps", ["the policy", ""], rows)

    compared = summary["comparison"]
    lengths = {(found["drafter"], found["steps"]): f"{found['value']:.2f}" for found in compared["accept_lengths"]}
    pairs = {(pair["drafter"], pair["minus"], pair["steps"]): gain(pair) for pair in compared["differences"]}
    rows = [
        [name, *(lengths[name, k] for k in STEPS), *(pairs.get(("co-trained", name, k), "") for k in STEPS)]
        for name in DRAFTERS
    ]
    rows.append(["uncoupled", "", "", *(gain(found) for found in summary["coupled"])])
    heads = [*(f"{k} drafts" for k in STEPS), *(f"co-trained minus it, {k} drafts" for k in STEPS)]
    table("Accept length of the drafters on this policy", ["drafter", *heads], rows)

    tail, rollout = summary["long_tail"], summary["rollout"]
    rows = [["plain, tokens/s", f"{tail['plain']:.0f}", "", f"{rollout['plain']:.0f}"]]
    for name, own in tail["drafters"].items():
        whole = rollout["drafters"].get(name)
        rows.append([f"{name} / plain", faster(own), f"{own['speedup_by_cpu']:.2f}", faster(whole) if whole else ""])
    heads = [f"{tail['batch']} samples at once", "by CPU time", f"{rollout['batch']} at once"]
    table("Tokens a second", ["drafter", *heads], rows)
    CONSOLE.print(f"texts equal under all drafters: {compared['equal_texts']} of {compared['prompts']}")
    CONSOLE.print("frozen: the warm start's drafter; control: trained as long on the warm policy's answers")
    CONSOLE.print("upper bound: trained twice as long on the final policy's answers")
    CONSOLE.print("uncoupled: the co-trained drafter, drafting its likeliest tokens without the verifier's noise")
    CONSOLE.print(
        f"\nRL raised the held-out reward from {summary['reward_first']:.2f} to {summary['reward_last']:.2f}."
        f"{closing(tail['drafters']['co-trained'])}"
    )


def closing(speed: Mapping[str, Any]) -> str:
    """Return the sentence about speed, with the range over repetitions; none is due if the range contains 1."""
    low, high = speed["range"]
    if low <= 1 <= high:
        return (
            f" The speeds are too noisy here for a sentence ({low:.2f} to {high:.2f} times as fast as without drafts)."
        )
    return f" With its drafter {FEW} long samples were generated {faster(speed)} times as fast as without drafts."


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    found = Table(*heads, title=title, box=None)
    for row in rows:
        found.add_row(*row)
    CONSOLE.print(found)


def interval(spread: Sequence[float]) -> str:
    return f"[{spread[0]:.3f}, {spread[1]:.3f}]"


def gain(found: Mapping[str, float]) -> str:
    """Format a difference of accept lengths, with its 95 % interval."""
    return f"{found['value']:+.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def faster(found: Mapping[str, Any]) -> str:
    """Format how many times as fast as plain an engine was, with the range over repetitions."""
    return f"{found['speedup']:.2f} [{found['range'][0]:.2f}, {found['range'][1]:.2f}]"


if __name__ == "__main__":
    main()
