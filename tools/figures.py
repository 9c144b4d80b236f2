"""Draw the pictures of docs/: a round over time, a push, the memory of a card that training and engine share, a report.

    python tools/figures.py                              # round.svg, push.svg and memory.svg
    python tools/figures.py --report runs/quickstart/rl  # report.png: the top of that run's report, by Chromium

docs/whole-step.png is drawn by benchmarks/whole_step.py, since it shows figures. loop.svg and life-of-a-sample.svg are
written by hand.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from PIL import Image  # noqa: E402

from megatron_rlspec import memory_estimate  # noqa: E402
from megatron_rlspec.config import load  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs"
TARGET, DRAFTER, NEUTRAL, GOOD = "#3f51b5", "#f0883e", "#90a4ae", "#2e7d32"
# Published config.json of Qwen3-8B.
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_8B_PARAMETERS = 8_190_735_360
CARD = int(79.2 * memory_estimate.GIB)


def save(figure: pyplot.Figure, name: str) -> None:
    """Write a picture into docs/, with the same bytes each time."""
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(DOCS / name, bbox_inches="tight", pad_inches=0.15, facecolor="white", metadata={"Date": None})
    pyplot.close(figure)
    print(DOCS / name)


def lane(axes: Axes, row: float, text: str) -> None:
    axes.text(-0.15, row, text, ha="right", va="center", fontsize=11, fontweight="bold")


def box(axes: Axes, row: float, start: float, width: float, text: str, color: str, size: float = 8.6) -> None:
    axes.barh(row, width, left=start, height=0.62, color=color, edgecolor="white", linewidth=1.5)
    axes.text(start + width / 2, row, text, ha="center", va="center", color="white", fontsize=size)


def draw_round() -> None:
    """Draw rounds without drafts, catching up, drafting and verifying, on one time axis."""
    figure, axes = pyplot.subplots(figsize=(11, 3.4))
    lane(axes, 1, "policy")
    lane(axes, 0, "drafter")
    for start in (0.0, 1.2):
        box(axes, 1, start, 1.1, "1 token", NEUTRAL)
    box(axes, 0, 2.5, 1.15, "catch up, d1", GOOD)
    start = 3.7
    for accepted in (2, 3):
        box(axes, 0, start, 0.45, "d2", DRAFTER)
        box(axes, 0, start + 0.5, 0.45, "d3", DRAFTER)
        box(axes, 1, start + 1.0, 1.6, "verify d1 d2 d3", TARGET)
        box(axes, 0, start + 2.65, 1.0, "extend, d1", DRAFTER)
        text = f"{accepted} drafts right: {accepted + 1} tokens"
        axes.text(start + 1.8, 1.5, text, ha="center", fontsize=10, color=TARGET)
        start += 3.7
    for edge in (2.42, 3.68, 7.38):
        axes.axvline(edge, color="#cccccc", linewidth=0.8, zorder=0)
    labels = (1.15, "off: no pass of the drafter"), (3.05, "once"), (5.5, "a round with 3 drafts"), (9.2, "the next")
    for x, text in labels:
        axes.text(x, -0.75, text, ha="center", fontsize=10, color="#444444")
    axes.text(1.15, 1.5, "the rule chose 0 drafts", ha="center", fontsize=10, color="#444444")
    axes.set(xlim=(-1.1, 11.2), ylim=(-1.0, 1.8))
    axes.axis("off")
    save(figure, "round.svg")


def draw_push() -> None:
    """Draw a push over time: who sends, who checks, what follows from a difference."""
    figure, axes = pyplot.subplots(figsize=(11, 4.4))
    rows = {"train ranks": 2, "rank 0": 1, "engine": 0}
    for text, row in rows.items():
        lane(axes, row, text)
    box(axes, 2, 0.0, 2.8, "gather a tensor at a time", TARGET)
    box(axes, 1, 0.4, 2.9, "fingerprint, bucket, send", TARGET)
    box(axes, 0, 0.8, 2.9, "load policy and drafter", TARGET)
    box(axes, 0, 3.75, 1.4, "fingerprint all", GOOD)
    box(axes, 1, 5.2, 1.0, "compare", GOOD)
    box(axes, 0, 6.25, 1.5, "canary prompts", GOOD)
    box(axes, 1, 7.8, 1.0, "new rule", DRAFTER)
    box(axes, 0, 8.85, 1.9, "generate version n", NEUTRAL)
    box(axes, 2, 2.85, 7.9, "wait for the next rollout", NEUTRAL)
    for start, end, low, high in ((5.1, 5.2, 0, 1), (6.15, 6.25, 1, 0), (7.7, 7.8, 0, 1), (8.75, 8.85, 1, 0)):
        axes.annotate("", (end, high), (start, low), arrowprops={"arrowstyle": "->", "color": "#777777"})
    axes.annotate(
        "different: hold drafts back, push once more, compare again.\n"
        "Still different: without drafts if only the drafter's tensors differ; else the engine leaves",
        (5.7, 0.68),
        (5.4, -1.25),
        ha="center",
        fontsize=10,
        color="#b71c1c",
        arrowprops={"arrowstyle": "->", "color": "#b71c1c"},
    )
    axes.set(xlim=(-1.5, 10.9), ylim=(-1.7, 2.5))
    axes.axis("off")
    save(figure, "push.svg")


def draw_memory() -> None:
    """Draw what a card of eight holds while ranks train and while the engine generates, by `memory_estimate`."""
    options = {"placement.mode": "colocated", "parallel.tensor": "4", "parallel.sequence": "true"}
    options |= {"optimizer.distributed": "true", "model.path": "Qwen3-8B", "model.max_length": "9216"}
    config = load(None, options)
    rank = memory_estimate.rank_memory(config, 8, QWEN3_8B_PARAMETERS // 4)
    activations = memory_estimate.activation_bytes(config, QWEN3_8B)
    engine = memory_estimate.engine_memory(config, QWEN3_8B, CARD, QWEN3_8B_PARAMETERS)
    share = memory_estimate.engine_share(engine, CARD, rank.between_steps)
    processes = 2 * memory_estimate.PROCESS_BYTES
    trained = (
        ("weights", rank.weights, TARGET),
        ("Adam, float32 copy", rank.optimizer, "#7986cb"),
        ("gradients", rank.gradients, "#b39ddb"),
        ("activations", activations, "#ce93d8"),
        ("engine, asleep", engine.asleep, DRAFTER),
        ("two processes", processes, NEUTRAL),
    )
    generated = (
        ("weights", rank.weights, TARGET),
        ("Adam, float32 copy", rank.optimizer, "#7986cb"),
        ("engine: weights", engine.weights, "#e65100"),
        ("engine: KV cache", share.kv_tokens * engine.token, DRAFTER),
        ("engine: work space", engine.working, "#ffb74d"),
        ("two processes", processes, NEUTRAL),
    )
    figure, axes = pyplot.subplots(figsize=(11, 3.2))
    for row, parts in ((1, trained), (0, generated)):
        left = 0.0
        for name, size, color in parts:
            width = size / memory_estimate.GIB
            axes.barh(row, width, left=left, height=0.5, color=color, edgecolor="white")
            if width > 3:
                axes.text(left + width / 2, row, f"{width:.0f}", ha="center", va="center", color="white", fontsize=10)
            above = row + 0.32
            axes.text(left + width / 2, above, name, ha="left", va="bottom", fontsize=8, rotation=18, color="#333333")
            left += width
    axes.axvline(CARD / memory_estimate.GIB, color="#b71c1c", linewidth=1)
    axes.text(CARD / memory_estimate.GIB + 0.5, 1, "79.2 GiB", color="#b71c1c", va="center", fontsize=9)
    axes.set(yticks=(1, 0), xlim=(0, 88), ylim=(-0.4, 1.9), xlabel="GiB of one card")
    axes.set_yticklabels(("while ranks train", "while engines generate"), fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    save(figure, "memory.svg")


def photograph(run: Path) -> None:
    """Write docs/report.png, the first screen of a run's report. Needs Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("figures: no Chromium on the path")
    subprocess.run([sys.executable, "-m", "megatron_rlspec.cli", "report", str(run)], check=True)
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1010"]
    page = (run / "report.html").resolve().as_uri()
    subprocess.run([*command, f"--screenshot={DOCS / 'report.png'}", page], check=True)
    picture = Image.open(DOCS / "report.png")
    picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=192).save(DOCS / "report.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, metavar="RUN_DIR", help="photograph this run's report only")
    options = parser.parse_args()
    if options.report:
        photograph(options.report)
        return
    draw_round()
    draw_push()
    draw_memory()


if __name__ == "__main__":
    main()
