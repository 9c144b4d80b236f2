"""`rlspec report RUN_DIR`: one self-contained HTML page of a run, readable while the run goes on."""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.metrics import read_records

Records = Sequence[Mapping[str, Any]]

TEMPLATE = Path(__file__).with_suffix(".html.j2")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rlspec report", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/report.html")
    options = parser.parse_args(argv)
    records = read_records(options.run_dir / "metrics.jsonl")
    if not records:
        parser.error(f"{options.run_dir}: no metrics.jsonl with at least one step; expected a run directory")
    out = options.out or options.run_dir / "report.html"
    files.write_output(out, render(options.run_dir, records))
    print(out)
    return 0


def render(run_dir: Path, records: Records) -> str:
    import jinja2

    samples = read_records(run_dir / "samples.jsonl")
    for sample in samples:
        rounds = sum(sample["accepted"])
        drafts = sum(i * n for i, n in enumerate(sample["accepted"]))
        sample.setdefault("pieces", [(sample["response"], False)])
        sample["accept_length"] = f"{1 + drafts / rounds:.2f}" if rounds else "plain"
    shown = ("rollout/reward", "rollout/accept_length", "rollout/tokens_per_second", "policy/loss")
    last = {key.split("/")[1]: f"{records[-1][key]:.3g}" for key in shown if key in records[-1]}
    config = run_dir / "config.json"
    return (
        jinja2.Environment(autoescape=True)
        .from_string(TEMPLATE.read_text())
        .render(
            name=run_dir.name,
            steps=len(records),
            last=last,
            plots=plots(records),
            events=read_records(run_dir / "events.jsonl"),
            samples=samples[-12:],
            config=json.dumps(json.loads(config.read_text()), indent=1) if config.exists() else "",
        )
    )


def plots(records: Records) -> list[tuple[str, str]]:
    """(title, base64 PNG) of every picture for which the records hold something."""
    parts = [part for part in ("generate", "train", "push") if f"seconds_{part}" in records[-1]]
    shares = sorted({key for record in records for key in record if key.startswith("spec/share_")})
    wanted = [
        ("reward", ["rollout/reward"], "line"),
        ("accept length (tokens per round)", ["rollout/accept_length"], "line"),
        ("share of rounds per configuration", shares, "stack"),
        ("drafter loss by depth", sorted(k for k in records[-1] if k.startswith("drafter/loss_")), "line"),
        ("drafter agreement by depth", sorted(k for k in records[-1] if k.startswith("drafter/match_")), "line"),
        ("seconds of a step", [f"seconds_{part}" for part in parts], "stack"),
        ("rollout tokens per second", ["rollout/tokens_per_second"], "line"),
        ("response length", [f"rollout/{name}_response" for name in ("median", "p90", "longest")], "line"),
        ("policy loss", ["policy/loss"], "line"),
        ("drafter loss, all depths", ["drafter/objective"], "line"),
        ("gradient norms", ["policy/grad_norm", "drafter/grad_norm"], "line"),
    ]
    kept = [(t, [k for k in keys if any(k in r for r in records)], kind) for t, keys, kind in wanted]
    return [(title, _picture(records, title, keys, kind)) for title, keys, kind in kept if keys]


def _picture(records: Records, title: str, keys: Sequence[str], kind: str) -> str:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record["step"] + 1 for record in records]
    series = [[record.get(key, 0.0 if kind == "stack" else float("nan")) for record in records] for key in keys]
    labels = [
        key.removeprefix("spec/share_").removeprefix("seconds_").removeprefix("rollout/").removesuffix("_response")
        for key in keys
    ]
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    if kind == "stack":
        axes.stackplot(steps, series, labels=labels)
    else:
        for values, label in zip(series, labels, strict=True):
            axes.plot(steps, values, label=label, marker="." if len(steps) < 3 else None)
    axes.set(title=title, xlabel="step")
    if len(keys) > 1:
        axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    plt.close(figure)
    return base64.b64encode(image.getvalue()).decode()
