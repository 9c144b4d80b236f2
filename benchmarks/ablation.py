"""Simulate what each part of three papers is worth: in its own paper's order, and as the last one, with all others on.

    python benchmarks/ablation.py examples/simulate/ablation.toml [--seeds N]

RLHFSpec, figure 13: speculation, selection, reallocation. ReSpec, figure 14: distillation, adaptive server, overlap.
PAT, figure 10: changes of the tensor-parallel size. docs/papers.md has the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rlspec.commands.simulate import Ratio, compare, policy, read

ALL = "adaptive+kd+overlap+auto+tp"


@dataclass(frozen=True)
class Part:
    """One part: policies without and with it, in its paper, and all parts of all papers but it."""

    name: str
    before: str
    after: str
    without: str


PARTS = (
    Part("RLHFSpec: speculation", "off", "k3", "off+auto+tp"),
    Part("RLHFSpec: selection", "k3", "adaptive", "k3+kd+overlap+auto+tp"),
    Part("RLHFSpec: reallocation", "adaptive", "adaptive+auto", "adaptive+kd+overlap+tp"),
    Part("ReSpec: distillation", "k3", "k3+kd", "adaptive+auto+tp"),
    Part("ReSpec: adaptive server", "k3+kd", "adaptive+kd", "k3+kd+overlap+auto+tp"),
    Part("ReSpec: overlap", "adaptive+kd", "adaptive+kd+overlap", "adaptive+kd+auto+tp"),
    Part("PAT: tensor-parallel size", "off", "off+tp", "adaptive+kd+overlap+auto"),
)


def policies() -> list[str]:
    """Return the names of all policies that the table needs, the base first."""
    return list(dict.fromkeys(name for p in PARTS for name in (p.before, p.after, p.without))) + [ALL]


def table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Format a Markdown table from each policy's seconds, by seed."""

    def ratio(before: str, after: str) -> Ratio:
        return Ratio.of([a / b for a, b in zip(seconds[before], seconds[after], strict=True)])

    lines = [
        "| part | in its paper's order | as the last one | step of its paper so far |",
        "|---|---|---|---|",
    ]
    for part in PARTS:
        alone, last, so_far = ratio(part.before, part.after), ratio(part.without, ALL), ratio("off", part.after)
        lines.append(f"| {part.name} | {alone} x | {last} x | {so_far} x |")
    lines.append(f"| all together | | | {ratio('off', ALL)} x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    config = read(args.config)
    runs = compare(config, {name: policy(name, config) for name in policies()}, args.seeds)
    print(table({name: [run.seconds for run in found] for name, found in runs.items()}))


if __name__ == "__main__":
    main()
