"""`rlspec plan`: the best speculative configuration per batch and context, from a cost table and acceptance rates.

With --cluster it also simulates rollouts: how many engines, which tensor-parallel size, colocated or apart, staleness 0
or 1, and at which length caps speculation pays (`sizing`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec import arguments, files
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.solver import (
    choices,
    compile_schedule,
    explain,
    sglang_adaptive_config,
    vllm_batch_schedule,
)
from megatron_rlspec.types import SpecConfig, SpecSchedule

EXAMPLE = """\
rlspec plan examples/cost_tables/h100-simulated.json --acceptance 0.8,0.7
rlspec plan --cluster examples/simulate/h100.toml --train-seconds 40"""
LEAST_ROUNDS = 8  # of a cell in a table of the gallery
MOST_BATCH = 1 << 14
MOST_LENGTH = 1 << 24


def main(argv: Sequence[str] | None = None) -> int:
    """Print the schedule and write the requested files. Returns 0, or 2 after one line about a mistake."""
    own = parser()
    args = own.parse_args(argv)
    if args.table is None and args.cluster is None:
        own.error(
            "the following arguments are required: table, written by `rlspec profile`, or --cluster FILE"
        )
    try:
        if args.check:
            return _check(args.table)
        if args.table:
            _plan(args)
        if args.cluster:
            _cluster(args)
    except ValueError as error:  # CostTableError and FileError among them
        print(f"rlspec plan: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(args: argparse.Namespace) -> None:
    named = {f"--{name}": getattr(args, name) for name in ("json", "sglang", "vllm")}
    files.check_outputs(named, {"the cost table": args.table})
    for batch, context in args.why:
        if context < batch:
            raise ValueError(
                f"--why {batch},{context}: expected a context of at least one token for each request"
            )
    table = CostTable.load(args.table)
    table = table.at(args.tp if args.tp is not None else _only_tp(table))
    candidates = _candidates(table, args.steps)
    schedule = compile_schedule(
        table, args.acceptance, candidates, max_batch=args.max_batch, lengths=(64, args.max_length)
    )
    settings = {"length": args.length, "max_batch": args.max_batch}
    outputs: list[tuple[Path, Any]] = []
    if args.json:
        outputs.append((args.json, schedule.to_json()))
    if args.sglang:
        outputs.append(
            (args.sglang, sglang_adaptive_config(table, args.acceptance, candidates, **settings))
        )
    if args.vllm:
        outputs.append(
            (args.vllm, vllm_batch_schedule(table, args.acceptance, candidates, **settings))
        )
    _header(table, args.acceptance)
    print(render(schedule, args.max_batch))
    print("\n" + gains(table, args.acceptance, candidates, args.max_batch))
    _mark_extrapolation(table, args.max_batch, args.max_length)
    for batch, context in args.why:
        print("\n" + explain(table, args.acceptance, batch, context, candidates))
    for path, content in outputs:
        files.write_output(path, json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}")


def _cluster(args: argparse.Namespace) -> None:
    """Print what simulated rollouts answer. With a table, its costs replace those of the file."""
    from megatron_rlspec.commands import simulate, sizing

    config = simulate.read(args.cluster)
    if args.table:
        config = config.model_copy(
            update={
                "cluster": config.cluster.model_copy(
                    update={"table": str(args.table), "hardware": ""}
                )
            }
        )
        print()
    for line in sizing.answers(
        sizing.Rollouts(config, args.seeds), args.train_seconds, args.wake_seconds
    ):
        print(line, flush=True)


def _check(path: Path) -> int:
    """Say whether a table can join the gallery. Returns 0, or 1 if something is missing."""
    table = CostTable.load(path)
    lacks = list(lacking(table))
    for lack in lacks:
        print(f"rlspec plan: {path}: {lack}", file=sys.stderr)
    rounds = sum(row.samples for row in table.rounds)
    print(
        f"{table.provenance.hardware}: {table.provenance.model}, tp={','.join(map(str, table.tps))}, "
        f"{len(table.rounds)} cells, {rounds} rounds, {len(table.repairs)} repaired, "
        f"median error of the fitted model {max(table.fit_error(tp) for tp in table.tps):.1%}: "
        + ("not ready for the gallery" if lacks else "ready for the gallery")
    )
    return int(bool(lacks))


def lacking(table: CostTable) -> Iterator[str]:
    """Yield what keeps a measured table from the gallery of `examples/cost_tables`, one sentence each."""
    p = table.provenance
    for name in ("model", "hardware", "dtype", "engine", "engine_version", "date"):
        if not str(getattr(p, name)).strip("- "):
            yield f"provenance.{name} is empty; `rlspec profile` records it"
    if p.simulated:
        yield "provenance.simulated is true; a contributed table is measured"
    for tp in table.tps:
        configs = table.configs(tp)
        if not any(config.off for config in configs) or all(config.off for config in configs):
            yield f"tp={tp} has {', '.join(map(str, configs))}; expected off and at least one number of drafts"
        if len(table.batches(tp)) < 3 or len(table.lengths(tp)) < 2:
            yield (
                f"tp={tp} has {len(table.batches(tp))} batches and {len(table.lengths(tp))} contexts; "
                "expected at least 3 and 2: `rlspec profile --batches 1,4,16,64 --lengths 64,512`"
            )
    few = min(row.samples for row in table.rounds)
    if few < LEAST_ROUNDS:
        yield f"a cell has {few} rounds; expected at least {LEAST_ROUNDS}, as `rlspec profile` measures"


def render(schedule: SpecSchedule, max_batch: int) -> str:
    """Format a schedule as a table: a row per range of running requests, a column per range of total context."""
    lasts = [edge - 1 for edge in schedule.batch_edges[1:]] + [max_batch]
    names = [
        f"{a}" if a == b else f"{a}-{b}" for a, b in zip(schedule.batch_edges, lasts, strict=True)
    ]
    smallest = "any" if len(schedule.context_edges) == 1 else "less"
    heads = [f">= {edge}" if edge else smallest for edge in schedule.context_edges]
    width = max(9, *(len(head) + 2 for head in heads))
    lines = ["best configuration by running requests (rows) and total context tokens (columns)"]
    lines.append(f"{'':>10}" + "".join(f"{head:>{width}}" for head in heads))
    for name, row in zip(names, schedule.configs, strict=True):
        lines.append(f"{name:>10}" + "".join(f"{config!s:>{width}}" for config in row))
    return "\n".join(lines)


def gains(
    table: CostTable, rates: Sequence[float], candidates: Sequence[SpecConfig], max_batch: int
) -> str:
    """Say how many times as fast as plain decoding the best configuration is, at a few numbers of running requests."""
    length = table.lengths()[len(table.lengths()) // 2]
    found = []
    batch = 1
    while batch <= max_batch:
        ranked = choices(table, rates, batch, int(batch * length), candidates)
        plain = next((choice for choice in ranked if choice.config.off), None)
        if plain is None:
            return "the table has no plain decoding (off), so it does not say what drafts gain"
        found.append(f"{batch}: {ranked[0].rate / plain.rate:.2f} ({ranked[0].config})")
        batch *= 4
    return f"times plain decoding, by running requests with {length:.0f} tokens each: " + ", ".join(
        found
    )


def _header(table: CostTable, rates: Sequence[float]) -> None:
    p = table.provenance
    kind = "simulated" if p.simulated else "measured"
    print(
        f"{kind} on {p.hardware}: {p.model}, {p.dtype}, {p.engine} {p.engine_version}, {p.date}, tp={table.tps[0]}"
    )
    print(
        f"batches {table.batches()[0]}..{table.batches()[-1]}, mean context {table.lengths()[0]:.0f}..",
        end="",
    )
    print(
        f"{table.lengths()[-1]:.0f}; costs outside come from a fitted model, median error {table.fit_error():.1%}"
    )
    print("acceptance by depth: " + " ".join(f"{rate:.2f}" for rate in rates))
    if table.repairs:
        worst = max(table.repairs, key=lambda r: abs(r.ms / r.cell.ms - 1))
        print(
            f"{len(table.repairs)} cells, measured cheaper than cells with less work, were repaired; worst: {worst}"
        )
    print()


def _mark_extrapolation(table: CostTable, max_batch: int, max_length: int) -> None:
    if max_batch > table.batches()[-1] or max_length > table.lengths()[-1]:
        print(
            f"beyond batch {table.batches()[-1]} or mean context {table.lengths()[-1]:.0f} costs are extrapolated"
        )


def _candidates(table: CostTable, steps: Sequence[int] | None) -> list[SpecConfig]:
    known = table.configs()
    if steps is None:
        return list(known)
    chosen = [c for c in known if c.num_steps in steps]
    missing = sorted(set(steps) - {c.num_steps for c in chosen})
    if missing:
        raise CostTableError(
            f"cost table holds no num_steps={missing[0]}; it holds {', '.join(map(str, known))}"
        )
    return chosen


def _only_tp(table: CostTable) -> int:
    if len(table.tps) > 1:
        raise CostTableError(f"cost table holds tp={list(table.tps)}: choose one with --tp")
    return table.tps[0]


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec plan",
        description=__doc__.partition("\n")[0].partition(": ")[2],
        example=EXAMPLE,
        first=("--acceptance", "--max-batch", "--cluster", "--train-seconds", "--sglang"),
    )
    add = p.add_argument
    add("table", type=Path, nargs="?", help="cost table written by `rlspec profile`")
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
    length = arguments.integer(1, MOST_LENGTH)
    add(
        "--max-length",
        type=length,
        default=8192,
        help="longest mean context per request (default 8192 tokens)",
    )
    add(
        "--length",
        type=length,
        default=2048,
        help="mean context per request for --sglang and --vllm (default 2048)",
    )
    add(
        "--why",
        type=arguments.integers(1, 1 << 40, count=2),
        action="append",
        default=[],
        metavar="BATCH,CONTEXT",
        help="explain the choice for this many requests with this many tokens together; repeatable",
    )
    add(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="simulate this cluster and workload: a file of `rlspec simulate`",
    )
    add(
        "--train-seconds",
        type=arguments.number(0, 1e6),
        default=0.0,
        metavar="S",
        help="a training step on all GPUs takes S seconds: colocated or apart, staleness 0 or 1",
    )
    add(
        "--wake-seconds",
        type=arguments.number(0, 1e6),
        default=5.0,
        metavar="S",
        help="in which colocated engines release their memory and take it back, a step (default 5)",
    )
    add(
        "--seeds",
        type=arguments.integer(1, 1000),
        default=3,
        help="simulated rollouts of each case (default 3)",
    )
    add(
        "--check",
        action="store_true",
        help="only say whether the table can join the gallery of examples/cost_tables",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the schedule for `rlspec serve` and set_schedule",
    )
    add(
        "--sglang",
        type=Path,
        metavar="FILE",
        help="write a --speculative-adaptive-config for plain SGLang",
    )
    add("--vllm", type=Path, metavar="FILE", help="write vLLM's speculative_config entries")
    of_table = (
        "--tp --acceptance --steps --max-batch --max-length --length --why --json --sglang --vllm"
    )
    of_cluster = "--train-seconds --wake-seconds --seeds"
    p.needs("table", f"{of_table} --check")
    p.needs("--cluster", of_cluster)
    p.needs("--train-seconds", "--wake-seconds")
    p.needs("--sglang --vllm", "--length")
    p.excludes("--check", f"{of_table} {of_cluster} --cluster")
    return p
