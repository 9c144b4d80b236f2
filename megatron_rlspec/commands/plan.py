"""`rlspec plan`: what drafts gain at which batch and context, by a cost table and acceptance rates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rlspec import arguments
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.solver import choices, explain

EXAMPLE = "rlspec plan examples/cost_tables/h100-simulated.json --acceptance 0.8,0.7"
BATCHES = (1, 4, 16, 64, 256)  # running requests


def main(argv: Sequence[str] | None = None) -> int:
    """Print the gains. Returns 0, or 2 after one line about a mistake."""
    args = parser().parse_args(argv)
    try:
        _plan(args)
    except ValueError as error:  # CostTableError is a ValueError
        print(f"rlspec plan: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(args: argparse.Namespace) -> None:
    for batch, context in args.why:
        if context < batch:
            raise ValueError(
                f"--why {batch},{context}: expected a context of at least one token for each request"
            )
    table = _of_one_size(CostTable.load(args.table), args.tp)
    _print_origin(table, args.acceptance)
    print(gains(table, args.acceptance))
    if BATCHES[-1] > table.batches()[-1]:
        print(f"beyond batch {table.batches()[-1]} costs are extrapolated")
    for batch, context in args.why:
        print()
        print(explain(table, args.acceptance, batch, context, table.configs()))


def gains(table: CostTable, rates: Sequence[float]) -> str:
    """Format how many times as fast as plain decoding the best configuration is.

    A row for each measured context of a request, a column for each of `BATCHES`.
    """
    lines = [
        "times plain decoding, by the context of each request (rows) and running requests (columns)"
    ]
    lines.append(" " * 10 + "".join(f"{batch:>12}" for batch in BATCHES))
    for length in table.lengths():
        line = f"{length:10.0f}"
        for batch in BATCHES:
            ranked = choices(table, rates, batch, int(batch * length), table.configs())
            best = ranked[0]
            plain = next(choice for choice in ranked if choice.config.off)
            gain = f"{best.rate / plain.rate:.2f} ({best.config})"
            line += f"{gain:>12}"
        lines.append(line)
    return "\n".join(lines)


def _print_origin(table: CostTable, rates: Sequence[float]) -> None:
    origin = table.provenance
    kind = "simulated" if origin.simulated else "measured"
    engine = f"{origin.engine} {origin.engine_version}"
    print(
        f"{kind} on {origin.hardware}: {origin.model}, {origin.dtype}, {engine}, {origin.date}, "
        f"tp={table.tps[0]}"
    )
    print(f"median error of the fitted model {table.fit_error():.1%}")
    print("acceptance by depth: " + " ".join(f"{rate:.2f}" for rate in rates))
    print()


def _of_one_size(table: CostTable, tp: int | None) -> CostTable:
    if tp is not None:
        return table.at(tp)
    if len(table.tps) > 1:
        raise CostTableError(f"cost table holds tp={list(table.tps)}: choose one with --tp")
    return table


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
        "--why",
        type=arguments.integers(1, 1 << 40, count=2),
        action="append",
        default=[],
        metavar="BATCH,CONTEXT",
        help="explain the choice for this many requests with this many tokens together; repeatable",
    )
    return p
