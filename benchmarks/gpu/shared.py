"""Decode alone, then beside a second process on the same GPU: one that waits on the host, and one whose kernel spins.

A rank that waits for the others in a collective of NCCL has such a kernel. GPUs give processes time slices in turn.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    batch = plan.shared_batch
    tokens = batch * (serving.PROMPT + plan.tokens + 64)
    drafts = max(plan.fixed)
    arguments = [
        *serving.options(plan, batch, tokens, 0.6, serving.UNCACHED),
        "--spec",
        "fixed",
        "--num-steps",
        str(drafts),
    ]
    with serving.launched(plan, folder, figures, "engine", arguments) as process:
        engine = SGLangEngine.of(process, timeout=300)
        alone = serving.speed(plan, engine, batch)
        figures.say("alone", alone, "tokens/s", f"batch {batch}, {drafts} drafts")
        for kind in ("waits", "spins"):
            name = f"beside a process that {kind}"
            with figures.attempt(name), _neighbour(kind, plan.device):
                found = serving.speed(plan, engine, batch)
                figures.say(name, found, "tokens/s")
                figures.say(f"{name} / alone", found / alone, "x")
        figures.say("alone, again / alone", serving.speed(plan, engine, batch) / alone, "x", "drift of the machine")


@contextmanager
def _neighbour(kind: str, device: str) -> Iterator[None]:
    """Run `neighbour.py` from when it says that it is ready. It ends with its standard input."""
    command = [sys.executable, str(Path(__file__).parent / "neighbour.py"), kind, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"neighbour.py {kind} ended with code {process.wait()}")
            yield
            if process.poll() is not None:
                raise RuntimeError(f"neighbour.py {kind} ended with code {process.returncode} during the measurement")
        finally:
            process.stdin.close()
