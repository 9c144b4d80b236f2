"""`rlspec plan`: the best speculative configuration per batch and context, from a cost table and acceptance rates."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rlspec import arguments, files
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.solver import choices, compile_schedule, explain
from megatron_rlspec.types import SpecConfig, SpecSchedule

EXAMPLE = "rlspec plan examples/cost_tables/h100-simulated.json --acceptance 0.8,0.7"
MOST_BATCH = 1 << 14
MOST_LENGTH = 1 << 24
SHORTEST = 64  # tokens of the shortest mean context per request


def main(argv: Sequence[str] | None = None) -> int:
    """Print the schedule. Returns 0, or 2 after one line about a mistake."""
    args = parser().parse_args(argv)
    try:
        _plan(args)
    except ValueError as error:  # CostTableError and FileError are ValueErrors
        print(f"rlspec plan: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(args: argparse.Namespace) -> None:
    files.check_outputs({"--json": args.json}, {"the cost table": args.table})
    for batch, context in args.why:
        if context < batch:
            raise ValueError(
                f"--why {batch},{context}: expected a context of at least one token for each request"
            )
    table = CostTable.load(args.table)
    table = table.at(_tensor_parallel_size(table, args.tp))
    candidates = _candidates(table, args.steps)
    schedule = compile_schedule(
        table,
        args.acceptance,
        candidates,
        max_batch=args.max_batch,
        lengths=(SHORTEST, args.max_length),
    )

    _print_origin(table, args.acceptance)
    print(schedule_table(schedule, args.max_batch))
    print()
    print(gains(table, args.acceptance, candidates, args.max_batch))
    last_batch = table.batches()[-1]
    last_length = table.lengths()[-1]
    if args.max_batch > last_batch or args.max_length > last_length:
        print(f"beyond batch {last_batch} or mean context {last_length:.0f} costs are extrapolated")
    for batch, context in args.why:
        print()
        print(explain(table, args.acceptance, batch, context, candidates))
    if args.json:
        files.write_output(args.json, json.dumps(schedule.to_json(), indent=1) + "\n")
        print(f"wrote {args.json}")


def schedule_table(schedule: SpecSchedule, max_batch: int) -> str:
    """Format a schedule: a row per range of running requests, a column per range of total context tokens."""
    heads = []
    for edge in schedule.context_edges:
        heads.append(f">= {edge}" if edge else "less")
    if len(heads) == 1:
        heads = ["any"]
    width = max(9, *(len(head) + 2 for head in heads))

    lines = ["best configuration by running requests (rows) and total context tokens (columns)"]
    lines.append(" " * 10 + "".join(head.rjust(width) for head in heads))
    ends = [*schedule.batch_edges[1:], max_batch + 1]
    for first, end, row in zip(schedule.batch_edges, ends, schedule.configs, strict=True):
        batches = str(first) if end == first + 1 else f"{first}-{end - 1}"
        lines.append(batches.rjust(10) + "".join(str(config).rjust(width) for config in row))
    return "\n".join(lines)


def gains(
    table: CostTable, rates: Sequence[float], candidates: Sequence[SpecConfig], max_batch: int
) -> str:
    """Say how many times as fast as plain decoding the best configuration is, at a few numbers of running requests."""
    lengths = table.lengths()
    length = lengths[len(lengths) // 2]
    parts = []
    batch = 1
    while batch <= max_batch:
        ranked = choices(table, rates, batch, int(batch * length), candidates)
        best = ranked[0]
        plain = [choice for choice in ranked if choice.config.off]
        if not plain:
            return "the table has no plain decoding (off), so it does not say what drafts gain"
        parts.append(f"{batch}: {best.rate / plain[0].rate:.2f} ({best.config})")
        batch *= 4
    head = f"times plain decoding, by running requests with {length:.0f} tokens each: "
    return head + ", ".join(parts)


def _print_origin(table: CostTable, rates: Sequence[float]) -> None:
    origin = table.provenance
    kind = "simulated" if origin.simulated else "measured"
    engine = f"{origin.engine} {origin.engine_version}"
    print(
        f"{kind} on {origin.hardware}: {origin.model}, {origin.dtype}, {engine}, {origin.date}, "
        f"tp={table.tps[0]}"
    )
    batches = table.batches()
    lengths = table.lengths()
    print(
        f"batches {batches[0]}..{batches[-1]}, mean context {lengths[0]:.0f}..{lengths[-1]:.0f}; "
        f"costs outside come from a fitted model, median error {table.fit_error():.1%}"
    )
    print("acceptance by depth: " + " ".join(f"{rate:.2f}" for rate in rates))
    print()


def _candidates(table: CostTable, steps: Sequence[int] | None) -> list[SpecConfig]:
    configs = table.configs()
    if steps is None:
        return list(configs)
    measured = {config.num_steps for config in configs}
    for step in steps:
        if step not in measured:
            names = ", ".join(map(str, configs))
            raise CostTableError(f"cost table holds no num_steps={step}; it holds {names}")
    return [config for config in configs if config.num_steps in steps]


def _tensor_parallel_size(table: CostTable, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    if len(table.tps) > 1:
        raise CostTableError(f"cost table holds tp={list(table.tps)}: choose one with --tp")
    return table.tps[0]


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec plan",
        description=__doc__.partition("\n")[0].partition(": ")[2],
        example=EXAMPLE,
    )
    add = p.add_argument
    add("table", type=Path, help="cost table written by `rlspec profile`")
    add(
        "--tp",
        type=arguments.integer(1, 4096),
        help="tensor parallel size, if the table holds several",
    )
    add(
        "--acceptance",
        type=arguments.numbers(0, 1),
        default=[0.8, 0.75, 0.7],
        help="a_1,a_2,...: acceptance rate at each depth; the last one is used for all deeper ones",
    )
    add(
        "--steps",
        type=arguments.distinct_integers(0, 1024),
        help="values of num_steps to choose from, such as 0,1,3 (default: all measured ones)",
    )
    add(
        "--max-batch",
        type=arguments.integer(1, MOST_BATCH),
        default=256,
        help=f"most running requests to plan for, up to {MOST_BATCH} (default 256)",
    )
    add(
        "--max-length",
        type=arguments.integer(1, MOST_LENGTH),
        default=8192,
        help="longest mean context per request (default 8192 tokens)",
    )
    add(
        "--why",
        type=arguments.integers(1, 1 << 40, count=2),
        action="append",
        default=[],
        metavar="BATCH,CONTEXT",
        help="explain the choice for this many requests with this many tokens together; repeatable",
    )
    add("--json", type=Path, metavar="FILE", help="write the schedule for `rlspec serve`")
    return p
