"""Compare the one-exchange roll with megatron-core's packed roll over gloo: time and messages.

    python benchmarks/roll.py [--quick] [--json FILE] [--cp 2] [--tokens 32768]

Both roll the same zigzag shards by one. Calls are interleaved, and results must be bit-identical. The time of a call is
that of the slowest rank. "4" rolls tokens, positions, labels and mask, as a multi-token-prediction layer does.
"4 + tables" also builds our index tables, which are built once per batch. Ratios are medians over medians, with the 5 %
and 95 % quantiles of the medians' bootstrap. These are CPU figures: on a GPU megatron-core's loop also synchronises
with the host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_rlspec.packing.context_parallel import slice_for_cp
from megatron_rlspec.packing.shift import RollPlan
from megatron_rlspec.train import runtime

SEQUENCES = (1, 16, 64, 256)


def uneven_lengths(sequences: int, total: int, unit: int) -> list[int]:
    """Draw multiples of `unit` that sum to `total`. The first half is longer by up to a quarter, the second shorter."""
    lengths = np.full(sequences, total // sequences)
    half = sequences // 2
    extra = np.random.default_rng(1).integers(0, max(1, lengths[0] // 4), half) // unit * unit
    lengths[:half] += extra
    lengths[half : 2 * half] -= extra
    assert lengths.sum() == total and not (lengths % unit).any()
    return lengths.tolist()


def messages(roll: Callable[[], Any]) -> int:
    """Count the messages that all ranks together send during one call."""
    sent = [0]
    isend = dist.isend

    def counted(*args: Any, **options: Any) -> Any:
        sent[0] += 1
        dist.distributed_c10d.isend = isend  # under the CPU stand-ins `isend` calls this name again
        work = isend(*args, **options)
        dist.distributed_c10d.isend = counted
        return work

    dist.isend = dist.distributed_c10d.isend = counted  # P2POp accepts only the function of that name
    roll()
    dist.isend = dist.distributed_c10d.isend = isend
    total = torch.tensor(sent)
    dist.all_reduce(total)
    return int(total)


def interleaved_ms(calls: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, np.ndarray]:
    """Measure milliseconds `[repetitions]` of each call on the slowest rank, in turn, after a warm-up."""
    times = torch.zeros(repetitions + 1, len(calls), dtype=torch.float64)
    for row in times:
        for i, call in enumerate(calls.values()):
            dist.barrier()
            start = time.perf_counter()
            call()
            row[i] = 1e3 * (time.perf_counter() - start)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(calls, times[1:].T.numpy(), strict=True))


def ratio_of_medians(slow: np.ndarray, fast: np.ndarray) -> tuple[float, float, float]:
    """Compute the ratio, and the 5 % and 95 % quantiles of its bootstrap."""
    rng = np.random.default_rng(0)
    draws = [np.median(rng.choice(slow, len(slow))) / np.median(rng.choice(fast, len(fast))) for _ in range(1000)]
    return float(np.median(slow) / np.median(fast)), *(float(x) for x in np.quantile(draws, (0.05, 0.95)))


def compare(sequences: int, total: int, size: int, repetitions: int) -> dict[str, Any]:
    """Measure both rolls on packed batches of `sequences` sequences. Every rank calls this."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    lengths = uneven_lengths(sequences, total, 2 * size)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(0, 1000, (1, total), generator=generator) for _ in range(3)]
    whole.append(torch.rand(1, total, generator=generator))
    four = [slice_for_cp(x, cu, rank, size) for x in whole]
    one = four[:1]

    def tables() -> RollPlan:
        return RollPlan(cu, rank, size, group=group)

    def theirs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [roll_tensor(x, cp_group=group, packed_seq_params=packed)[0] for x in tensors]

    plan = tables()
    for got, expected in zip(plan.roll(four), theirs(four), strict=True):
        assert torch.equal(got, expected)
    ms = interleaved_ms(
        {
            "megatron 1": lambda: theirs(one),
            "ours 1": lambda: plan.roll(one),
            "megatron 4": lambda: theirs(four),
            "ours 4": lambda: plan.roll(four),
            "ours 4 + tables": lambda: tables().roll(four),
        },
        repetitions,
    )
    return {
        "sequences": sequences,
        "ms": {name: float(np.median(x)) for name, x in ms.items()},
        "ratio": {
            "1": ratio_of_medians(ms["megatron 1"], ms["ours 1"]),
            "4": ratio_of_medians(ms["megatron 4"], ms["ours 4"]),
            "4 + tables": ratio_of_medians(ms["megatron 4"], ms["ours 4 + tables"]),
        },
        "messages": {
            "megatron 1": messages(lambda: theirs(one)),
            "ours 1": messages(lambda: plan.roll(one)),
            "megatron 4": messages(lambda: theirs(four)),
            "ours 4": messages(lambda: plan.roll(four)),
        },
    }


def work(rank: int, size: int, meeting: str, total: int, repetitions: int, target: str) -> None:
    """Run one rank: measure all numbers of sequences, print them on rank 0, and write them to `target`."""
    torch.set_num_threads(1)
    runtime.install()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    if rank == 0:
        print(f"{'sequences':>9} | {'megatron 1':>10} {'ours 1':>7} {'ratio':>20} | {'messages':>9} |", end=" ")
        print(f"{'megatron 4':>10} {'ours 4':>7} {'ratio':>20} {'with tables':>20} | {'messages':>9}")
    rows = []
    for sequences in SEQUENCES:
        row = compare(sequences, total, size, repetitions)
        rows.append(row)
        if rank == 0:
            ms = row["ms"]
            sent = row["messages"]
            ratio = {name: f"{r:.1f} ({low:.1f} to {high:.1f})" for name, (r, low, high) in row["ratio"].items()}
            print(
                f"{sequences:9d} | {ms['megatron 1']:10.2f} {ms['ours 1']:7.2f} {ratio['1']:>20} | "
                f"{sent['megatron 1']:4d} {sent['ours 1']:4d} | {ms['megatron 4']:10.2f} {ms['ours 4']:7.2f} "
                f"{ratio['4']:>20} {ratio['4 + tables']:>20} | {sent['megatron 4']:4d} {sent['ours 4']:4d}",
                flush=True,
            )
    if rank == 0:
        Path(target).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks")
    parser.add_argument("--tokens", type=int, default=32768, help="packed tokens of all ranks")
    options = parser.parse_args()
    conditions = {
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "backend": "gloo, one thread per rank",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": [round(x, 1) for x in os.getloadavg()],
        "context-parallel ranks": options.cp,
        "tokens": options.tokens,
        "repetitions": 7 if options.quick else 40,
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print("ms per call (median), ratio (90 % interval), messages sent by all ranks per call: megatron, ours")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        arguments = (options.cp, str(Path(folder) / "meeting"), options.tokens, conditions["repetitions"], str(target))
        torch.multiprocessing.spawn(work, arguments, options.cp)
        rows = json.loads(target.read_text())
    if options.json:
        temporary = options.json.with_suffix(".part")
        temporary.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1))
        temporary.replace(options.json)


if __name__ == "__main__":
    main()
