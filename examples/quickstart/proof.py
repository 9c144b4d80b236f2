"""Print the quickstart's closing table: what RL, co-training and speculation gained.

`python examples/quickstart/proof.py --run RUN_DIR` reads RUN_DIR/{warm,rl,control}, starts two engines on the final
policy, one that speculates and one launched without speculation. It writes RUN_DIR/summary.json and report.png. All
comparisons use the same weights, prompts and seeds, and the engines run in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from megatron_rlspec import config as configuration
from megatron_rlspec import data, files
from megatron_rlspec.metrics import read_records
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import Prompt, Request, Sample, Sampling, SpecConfig, SpecSchedule
from megatron_rlspec.weights.checkpoint import read_hf

CONSOLE = Console()
DRAFTERS = {"last": "rl", "frozen": "warm", "control": "control"}  # name in summary.json -> part of the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="directory of examples/quickstart.sh")
    parser.add_argument("--prompts", type=int, default=96, help="prompts of one comparison")
    parser.add_argument("--repeats", type=int, default=4, help="interleaved repetitions of the speed comparison")
    args = parser.parse_args()
    run = args.run
    settings = configuration.Config.model_validate_json((run / "rl/config.json").read_text())
    tokenizer = data.load_tokenizer(run / "rl/hf")
    prompts, _ = data.read_prompts(run / "task/eval.jsonl", settings.data, tokenizer, settings.model.max_length)
    sampling = Sampling(settings.rollout.temperature, max_new_tokens=settings.rollout.max_new_tokens)
    steps = ",".join(map(str, settings.spec.candidate_steps))
    shared = ["--dtype", settings.model.dtype, "--verifier", settings.spec.verifier]
    speculating = ["--spec", "adaptive", "--num-steps", str(settings.spec.num_steps), "--candidate-steps", steps]
    with (
        launch(run / "rl/hf", run / "proof/speculating.log", arguments=shared + speculating) as fast,
        launch(run / "rl/hf", run / "proof/plain.log", arguments=[*shared, "--spec", "off"]) as slow,
    ):
        with CONSOLE.status("starting a speculating and a plain engine"):
            engines = {"spec": SGLangEngine.of(fast.wait()), "plain": SGLangEngine.of(slow.wait())}
        summary = rewards(run) | times(run) | predictions(run)
        with CONSOLE.status("accept length of three drafters on the final policy's rollouts"):
            summary |= accept_lengths(run, engines["spec"], prompts[: args.prompts], sampling)
        engines["spec"].set_spec_rule(json.loads(rule_file(run / "rl").read_text()))
        with CONSOLE.status("tokens per second, engines in turn"):
            batch = prompts[: args.prompts]
            summary |= speeds("rollout", engines, batch, sampling, args.repeats)
            longest = sorted(prompts, key=lambda prompt: -len(prompt.tokens))[:2]
            summary |= speeds("long_tail", engines, longest, sampling, args.repeats)
    files.write(run / "summary.json", json.dumps(summary, indent=1) + "\n")
    show(summary)
    plot(run, summary)
    CONSOLE.print(f"written: {run / 'summary.json'}, {run / 'report.png'}")


def draw(engine: SGLangEngine, prompts: Sequence[Prompt], sampling: Sampling, salt: int) -> list[Sample]:
    """Draw one sample per prompt; `salt` sets ids and seeds."""
    requests = [Request(f"s{salt:04d}-p{i:05d}", p, seed=1000 * salt + i) for i, p in enumerate(prompts)]
    return engine.generate(requests, sampling)


def rule_file(run: Path) -> Path:
    """Return the path of `spec_rule.json` in a run. Before 0.2.0 the file was called `policy.json`."""
    path = run / "spec_rule.json"
    return path if path.exists() else run / "policy.json"


def rewards(run: Path) -> dict:
    """Read the held-out reward before the first and after the last step, with Wilson's 95 % interval."""
    found = {}
    for event in read_records(run / "rl/events.jsonl"):
        if event["kind"] == "evaluation":
            n = round(event["prompts"])
            interval = stats.binomtest(round(event["reward"] * n), n).proportion_ci(method="wilson")
            found[f"reward_{event['name']}"] = event["reward"]
            found[f"reward_{event['name']}_interval"] = [interval.low, interval.high]
            found["reward_prompts"] = n
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
        "uncalibrated_error": float(
            np.mean([abs(r["predict/uncalibrated_tokens"] - r["predict/observed_tokens"]) for r in scored])
        ),
    }


def accepted_drafts(sample: Sample) -> int:
    """Count the accepted drafts of one sample."""
    return sum(drafts * rounds for drafts, rounds in enumerate(sample.accepted))


def accept_lengths(run: Path, engine: SGLangEngine, prompts: Sequence[Prompt], sampling: Sampling) -> dict:
    """Measure tokens per round at three fixed steps with each drafter. The texts must be the same with all of them."""
    engine.set_schedule(SpecSchedule.fixed(SpecConfig(3)))
    found: dict = {"accept_length_num_steps": 3}
    texts = {}
    for version, (name, part) in enumerate([*DRAFTERS.items(), ("last", "rl")], start=1):
        tensors = read_hf(run / part / "hf")[1]
        drafter = [(key, tensors[key]) for key in tensors if ".mtp_layers." in key]
        engine.update_weights(version, drafter, scope="drafter")
        if version > len(DRAFTERS):
            break  # the last push only restores the engine's own drafter
        samples = draw(engine, prompts, sampling, salt=1)
        texts[name] = [tuple(sample.response) for sample in samples]
        rounds = np.array([sum(s.accepted) for s in samples])
        drafts = np.array([accepted_drafts(s) for s in samples])
        interval = stats.bootstrap(
            (rounds, drafts), lambda r, d, axis: 1 + d.sum(axis) / r.sum(axis), paired=True, rng=1, n_resamples=2000
        ).confidence_interval
        found[f"accept_length_{name}"] = 1 + float(drafts.sum() / rounds.sum())
        found[f"accept_length_{name}_interval"] = [float(interval.low), float(interval.high)]
    same = sum(len(set(column)) == 1 for column in zip(*texts.values(), strict=True))
    return found | {"texts_equal_under_all_drafters": f"{same} of {len(prompts)}"}


def speeds(
    name: str, engines: dict[str, SGLangEngine], prompts: Sequence[Prompt], sampling: Sampling, repeats: int
) -> dict:
    """Measure median tokens per second of both engines over interleaved repetitions, and the median pairwise ratio."""
    rates: dict[str, list[float]] = {key: [] for key in engines}
    for repeat in range(repeats + 1):
        for key in sorted(engines, reverse=bool(repeat % 2)):
            began = time.perf_counter()
            tokens = sum(len(s.response) for s in draw(engines[key], prompts, sampling, salt=10 + repeat))
            if repeat:  # the first repetition is a warm-up
                rates[key].append(tokens / (time.perf_counter() - began))
    ratios = np.divide(rates["spec"], rates["plain"])
    return {
        f"{name}_tokens_per_s_spec": float(np.median(rates["spec"])),
        f"{name}_tokens_per_s_plain": float(np.median(rates["plain"])),
        f"{name}_speedup": float(np.median(ratios)),
        f"{name}_speedup_range": [float(ratios.min()), float(ratios.max())],
        f"{name}_batch": len(prompts),
        f"{name}_repeats": repeats,
    }


def show(summary: dict) -> None:
    """Print the closing table."""
    table = Table(title=f"After {summary['steps']} GRPO steps")
    for column in ("figure", "value", "95 % interval or range", "as expected?"):
        table.add_column(column)

    def row(text: str, key: str, spread: str = "", expected: bool | None = None, form: str = "{:.3f}") -> None:
        low_high = " … ".join(form.format(x) for x in summary[spread]) if spread else ""
        verdict = ""
        if expected is not None:
            verdict = "[green]yes" if expected else "[bold red]NO"
        table.add_row(text, form.format(summary[key]), low_high, verdict)

    row("held-out reward, first", "reward_first", "reward_first_interval")
    better = summary["reward_last_interval"][0] > summary["reward_first_interval"][1]
    row("held-out reward, last", "reward_last", "reward_last_interval", better)
    last, frozen, control = (summary[f"accept_length_{name}"] for name in DRAFTERS)
    row("accept length, co-trained drafter", "accept_length_last", "accept_length_last_interval", last > frozen)
    row("accept length, frozen warm-start drafter", "accept_length_frozen", "accept_length_frozen_interval")
    better = last > control
    row("accept length, control drafter", "accept_length_control", "accept_length_control_interval", better)
    for name, text in (("rollout", "rollout"), ("long_tail", "long tail")):
        batch = summary[f"{name}_batch"]
        row(f"{text}, batch {batch}: tokens/s speculating", f"{name}_tokens_per_s_spec", form="{:.0f}")
        row(f"{text}, batch {batch}: tokens/s plain", f"{name}_tokens_per_s_plain", form="{:.0f}")
        faster = summary[f"{name}_speedup"] > 1
        row(f"{text}, batch {batch}: speed-up", f"{name}_speedup", f"{name}_speedup_range", faster, "{:.2f}")
    if "prediction_error" in summary:
        text = f"tokens per round predicted one step ahead, {summary['predicted_steps']} steps"
        row(f"{text}: mean absolute error", "prediction_error", expected=summary["prediction_error"] <= 0.1)
        row("the same, assuming the last rollout's rates", "last_value_error")
        row("the same, without calibration", "uncalibrated_error")
    for part in ("generate", "push", "train"):
        row(f"seconds, {part}", f"seconds_{part}", form="{:.1f}")
    CONSOLE.print(table)
    CONSOLE.print(f"texts equal under all three drafters: {summary['texts_equal_under_all_drafters']}")


def plot(run: Path, summary: dict) -> None:
    """Draw report.png: curves of the run, and the closing comparisons."""
    records = read_records(run / "rl/metrics.jsonl")
    steps = [record["step"] + 1 for record in records]
    figure, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    a.plot(steps, [r["rollout/reward"] for r in records], color="tab:green")
    a.set(title="reward of the rollouts", xlabel="step", ylim=(0, 1))
    b.plot(steps, [r["rollout/accept_length"] for r in records], color="tab:blue")
    b.set(title="accept length, as scheduled", xlabel="step", ylabel="tokens per round")
    parts = ("generate", "train", "push")
    c.stackplot(steps, [[r[f"seconds_{part}"] for r in records] for part in parts], labels=parts)
    c.set(title="seconds of a step", xlabel="step")
    c.legend(loc="upper right")
    bars(d, summary, {"warm start": "reward_first", "after RL": "reward_last"}, "held-out reward, 95 %")
    labels = {"co-trained": "accept_length_last", "frozen": "accept_length_frozen", "control": "accept_length_control"}
    bars(e, summary, labels, "accept length on the final policy, 95 %")
    e.set_ylim(bottom=1)
    names = [f"{name.replace('_', ' ')}\nbatch {summary[f'{name}_batch']}" for name in ("rollout", "long_tail")]
    for offset, key, color in ((-0.2, "plain", "tab:gray"), (0.2, "spec", "tab:blue")):
        values = [summary[f"{name}_tokens_per_s_{key}"] for name in ("rollout", "long_tail")]
        f.bar(np.arange(2) + offset, values, 0.4, label={"plain": "plain", "spec": "speculating"}[key], color=color)
    f.set(title="tokens per second (median)", xticks=[0, 1], xticklabels=names)
    f.legend()
    partial = run / ".report.png"
    figure.savefig(partial, dpi=110, format="png")
    partial.replace(run / "report.png")


def bars(axes: plt.Axes, summary: dict, labels: dict[str, str], title: str) -> None:
    """Draw one bar per label, with its 95 % interval."""
    values = np.array([summary[key] for key in labels.values()])
    intervals = np.array([summary[f"{key}_interval"] for key in labels.values()]).T
    axes.bar(list(labels), values, yerr=np.abs(intervals - values), capsize=5, color="tab:blue", alpha=0.8)
    axes.set_title(title)


if __name__ == "__main__":
    main()
