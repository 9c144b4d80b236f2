"""`rlspec plan`: the best speculative configuration per batch and context, from a cost table and acceptance rates."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.solver import (
    compile_schedule,
    explain,
    sglang_adaptive_config,
    vllm_batch_schedule,
)
from megatron_rlspec.types import SpecConfig, SpecSchedule


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        table = CostTable.load(args.table)
        table = table.at(args.tp if args.tp is not None else _only_tp(table))
        candidates = _candidates(table, args.steps)
        _header(table, args.acceptance)
        schedule = compile_schedule(
            table, args.acceptance, candidates, max_batch=args.max_batch, lengths=(64, args.max_length)
        )
        print(render(schedule, args.max_batch))
        _mark_extrapolation(table, schedule, args.max_batch, args.max_length)
        for batch, context in args.why:
            print("\n" + explain(table, args.acceptance, batch, context, candidates))
        settings = {"length": args.length, "max_batch": args.max_batch}
        if args.json:
            write(args.json, schedule.to_json())
        if args.sglang:
            write(args.sglang, sglang_adaptive_config(table, args.acceptance, candidates, **settings))
        if args.vllm:
            write(args.vllm, vllm_batch_schedule(table, args.acceptance, candidates, **settings))
    except (CostTableError, ValueError) as error:
        print(f"rlspec plan: {error}", file=sys.stderr)
        return 2
    return 0


def render(schedule: SpecSchedule, max_batch: int) -> str:
    """The schedule as a table: a row per range of running requests, a column per range of total context."""
    lasts = [edge - 1 for edge in schedule.batch_edges[1:]] + [max_batch]
    names = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(schedule.batch_edges, lasts, strict=True)]
    heads = [
        f">= {edge}" if edge else "any" if len(schedule.context_edges) == 1 else "less"
        for edge in schedule.context_edges
    ]
    width = max(9, *(len(head) + 2 for head in heads))
    lines = ["best configuration by running requests (rows) and total context tokens (columns)"]
    lines.append(f"{'':>10}" + "".join(f"{head:>{width}}" for head in heads))
    for name, row in zip(names, schedule.configs, strict=True):
        lines.append(f"{name:>10}" + "".join(f"{config!s:>{width}}" for config in row))
    return "\n".join(lines)


def write(path: Path, data: Any) -> None:
    """JSON, the whole file or none of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(part, path)
    print(f"wrote {path}")


def _header(table: CostTable, rates: Sequence[float]) -> None:
    p = table.provenance
    kind = "simulated" if p.simulated else "measured"
    print(f"{kind} on {p.hardware}: {p.model}, {p.dtype}, {p.engine} {p.engine_version}, {p.date}, tp={table.tps[0]}")
    print(f"batches {table.batches()[0]}..{table.batches()[-1]}, mean context {table.lengths()[0]:.0f}..", end="")
    print(f"{table.lengths()[-1]:.0f}, outside by a model that fits to {table.fit_error():.1%} (median)")
    print("acceptance by depth: " + " ".join(f"{rate:.2f}" for rate in rates))
    if table.repairs:
        worst = max(table.repairs, key=lambda r: abs(r.ms / r.cell.ms - 1))
        print(f"{len(table.repairs)} cells repaired, where more work measured cheaper; the largest: {worst}")
    print()


def _mark_extrapolation(table: CostTable, schedule: SpecSchedule, max_batch: int, max_length: int) -> None:
    if max_batch > table.batches()[-1] or max_length > table.lengths()[-1]:
        print(f"beyond batch {table.batches()[-1]} or mean context {table.lengths()[-1]:.0f} costs are extrapolated")


def _candidates(table: CostTable, steps: Sequence[int] | None) -> list[SpecConfig]:
    known = table.configs()
    if steps is None:
        return list(known)
    chosen = [c for c in known if c.num_steps in steps]
    missing = sorted(set(steps) - {c.num_steps for c in chosen})
    if missing:
        raise CostTableError(f"cost table holds no num_steps={missing[0]}; it holds {', '.join(map(str, known))}")
    return chosen


def _only_tp(table: CostTable) -> int:
    if len(table.tps) > 1:
        raise CostTableError(f"cost table holds tp={list(table.tps)}: say which with --tp")
    return table.tps[0]


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates lie between 0 and 1")
    return rates


def _steps(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _cell(text: str) -> tuple[int, int]:
    batch, context = (int(part) for part in text.split(","))
    return batch, context


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlspec plan", description=__doc__.partition(": ")[2])
    parser.add_argument("table", type=Path, help="cost table written by `rlspec profile`")
    parser.add_argument("--tp", type=int, help="tensor parallel size, if the table holds several")
    parser.add_argument(
        "--acceptance", type=_rates, default=[0.8, 0.75, 0.7], help="a_1,a_2,... of the drafter; the last one repeats"
    )
    parser.add_argument("--steps", type=_steps, help="num_steps to choose from, such as 0,1,3 (default: all measured)")
    parser.add_argument("--max-batch", type=int, default=256, help="most running requests to plan for")
    parser.add_argument("--max-length", type=int, default=8192, help="longest mean context per request to plan for")
    parser.add_argument("--length", type=int, default=2048, help="mean context per request for --sglang and --vllm")
    parser.add_argument(
        "--why", type=_cell, action="append", default=[], metavar="BATCH,CONTEXT", help="explain one choice; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write the schedule for `rlspec serve` and set_schedule")
    parser.add_argument("--sglang", type=Path, help="write a --speculative-adaptive-config for plain SGLang")
    parser.add_argument("--vllm", type=Path, help="write vLLM's speculative_config entries")
    return parser


if __name__ == "__main__":
    sys.exit(main())
