"""Predictions of recorded rollouts of real engines; `benchmarks/simulate.py --record` wrote the file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fit_acceptance import fit

from megatron_rlspec.extensions.simulator.run_engines import run_engines
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel
from megatron_rlspec.extensions.simulator.sim_engine import Durations, SimEngine, SimSample
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, SpecSchedule

RECORD = json.loads((Path(__file__).parent / "recorded_rollouts.json").read_text())
KNOWN = RECORD["calibration"]
ROLLOUTS = {rollout["name"]: rollout for rollout in RECORD["rollouts"]}
SEEDS = 8
STEPS = 3  # drafts of the calibration's rounds


@pytest.fixture(scope="module")
def table() -> CostTable:
    return CostTable.from_json(KNOWN["table"])


@pytest.fixture(scope="module")
def acceptance() -> AcceptanceModel:
    return fit(KNOWN["accepted"], STEPS)


def shares_of(acceptance: AcceptanceModel) -> dict[int, np.ndarray]:
    """Return the shares of easy tokens that the calibration's samples had, by prompt."""
    prompts = np.array(KNOWN["prompts"])
    return {int(prompt): acceptance.shares[prompts == prompt] for prompt in np.unique(prompts)}


def predicted(real: dict, table: CostTable, acceptance: AcceptanceModel, shares: dict[int, np.ndarray]) -> dict:
    """Return the relative errors of the makespan, and of the rounds of each configuration with a tenth of them."""
    schedule = SpecSchedule.from_json(real["schedule"])
    durations = Durations(table, table.configs())
    makespans = []
    counts: dict[str, int] = {}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        samples = []
        for i, (prompt, tokens, length) in enumerate(real["samples"]):
            share = float(rng.choice(shares[prompt])) if shares else 0.5
            samples.append(SimSample(f"s{i:04d}", tokens, length, prompt, share, int(rng.random() >= share)))
        engines = [
            SimEngine(
                name,
                durations,
                schedule,
                acceptance,
                rng,
                prefill=lambda tokens: table.prefill_ms(tokens) - table.ms(OFF, 1, tokens),
                chunk=2048,
                max_running=real["max_running"],
                embedded=True,
            )
            for name in "ab"[: real["engines"]]
        ]
        trace = run_engines(samples, engines, 400)
        makespans.append(trace.makespan_ms)
        for config, count in trace.configs.items():
            counts[str(config)] = counts.get(str(config), 0) + count
    frequent = {name: n for name, n in real["rounds"].items() if n >= sum(real["rounds"].values()) / 10}
    rounds = [counts.get(name, 0) / SEEDS / n - 1 for name, n in frequent.items()]
    return {"makespan": float(np.mean(makespans)) / real["makespan_ms"] - 1, "rounds": rounds}


def test_recorded_rollouts_are_predicted(table, acceptance):
    found = [predicted(real, table, acceptance, shares_of(acceptance)) for real in ROLLOUTS.values()]
    spans = [abs(one["makespan"]) for one in found]
    assert np.median(spans) <= 0.05 and max(spans) <= 0.10, spans
    rounds = [abs(error) for one in found for error in one["rounds"]]
    assert np.median(rounds) <= 0.05 and max(rounds) <= 0.10, found


def test_the_mean_length_misses(table, acceptance):
    spans = []
    for real in ROLLOUTS.values():
        mean = round(np.mean([length for _, _, length in real["samples"]]))
        flat = real | {"samples": [[prompt, tokens, mean] for prompt, tokens, _ in real["samples"]]}
        spans.append(abs(predicted(flat, table, acceptance, shares_of(acceptance))["makespan"]))
    assert np.median(spans) > 0.10, spans


def test_the_mean_acceptance_misses(table, acceptance):
    drafts = np.concatenate([np.asarray(rounds) for rounds in KNOWN["accepted"]])
    rates = [float((drafts > d).sum() / (drafts >= d).sum()) for d in range(STEPS)]
    independent = replace(acceptance, rates=np.array([rates, rates]), persistence=0.0)
    fitted = [abs(predicted(real, table, acceptance, shares_of(acceptance))["makespan"]) for real in ROLLOUTS.values()]
    control = [abs(predicted(real, table, independent, {})["makespan"]) for real in ROLLOUTS.values()]
    assert np.median(control) > 1.1 * np.median(fitted), (control, fitted)
