"""Move one running sample with a long context to a second engine on the same GPU, with its KV cache and without."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import numpy as np

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.moves import Moved, Mover, discard
from megatron_rlspec.extensions.migration.protocol import TransferRequest
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import Held, Move, Request, Sampling


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    response = max(512, plan.moved // 2)
    arguments = [
        *serving.options(plan, 4, 2 * (plan.moved + response + 128), 0.4),
        "--spec",
        "off",
        "--extensions",
        "migration",
    ]
    with contextlib.ExitStack() as stack:
        model = serving.directory(plan, folder)
        processes = {
            name: stack.enter_context(launch(model, figures.log(name), arguments=arguments))
            for name in ("source", "target")
        }
        engines = {name: MigratableSGLangEngine.of(process.wait(), timeout=240) for name, process in processes.items()}
        for name in engines:  # what a first call compiles is in no figure
            serving.rollout(plan, engines[name], serving.asked(plan, 1, plan.moved, seed=1), 2)
        with figures.attempt("prefill"):
            _say_prefill(plan, figures, engines["target"])
        with figures.attempt("KV cache by files"):
            _stages(plan, figures, engines["source"], engines["target"], response)
        for way in ("kv", "recompute"):
            with figures.attempt(f"a move, {way}"):
                _move(plan, figures, engines, way, response)


def _say_prefill(plan: Plan, figures: Figures, engine: MigratableSGLangEngine) -> None:
    seconds = [serving.rollout(plan, engine, serving.asked(plan, 1, plan.moved, seed=s), 1)[0] for s in (20, 30, 40)]
    note = "of the whole context, first token and HTTP included; what a move without its KV cache costs the target"
    figures.say("prefill", 1000 * sorted(seconds)[1], "ms", f"{plan.moved:,} tokens; {note}")


def _stages(
    plan: Plan, figures: Figures, source: MigratableSGLangEngine, target: MigratableSGLangEngine, response: int
) -> None:
    """Copy the final columns of a sample that goes on, with room for all that it may become."""
    [request] = serving.asked(plan, 1, plan.moved, seed=50)
    errors: list[EngineError] = []
    thread = threading.Thread(target=_generate, args=(source, request, response, errors))
    thread.start()
    try:
        held = _running(source, request.id)
        note = TransferRequest(request.id, np.asarray(request.prompt.tokens, np.int64), plan.moved + response + 64)
        grants = target.offer(source.progress().version, [note])
        began = time.perf_counter()
        sent = source.export(grants)
        written = time.perf_counter()
        taken = target.accept([piece for piece in sent if not piece.refused])
        read = time.perf_counter()
        refused = [answer.refused for answer in (*grants, *sent, *taken) if answer.refused]
        if refused:
            raise EngineError(refused[0])
        size = sum(piece.bytes for piece in sent)
        figures.say("KV cache: bytes", size / 1e9, "GB", f"{held.context:,} tokens")
        figures.say("KV cache: out of the source", 1000 * (written - began), "ms", "its scheduler stands still")
        figures.say("KV cache: into the target", 1000 * (read - written), "ms", "its scheduler stands still")
        discard(sent)
    finally:
        target.withdraw()
        source.abort([request.id])
        thread.join()
    if errors:
        raise errors[0]


def _generate(engine: MigratableSGLangEngine, request: Request, response: int, errors: list[EngineError]) -> None:
    try:
        engine.generate([request], Sampling(max_new_tokens=response, ignore_eos=True))
    except EngineError as error:
        errors.append(error)


def _running(engine: MigratableSGLangEngine, name: str) -> Held:
    """Return the sample once the engine decodes it. Raises EngineError after a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for held in engine.progress().running:
            if held.id == name and held.context > held.prompt:
                return held
        time.sleep(0.01)
    raise EngineError(f"{engine.url}: the sample did not begin to decode within a minute")


class _OneMove:
    """Moves the first sample that decodes from `source` to `target`, once, while a `generate` runs."""

    def __init__(self, owner: RunningRequests, engines: dict[str, MigratableSGLangEngine], way: str, name: str) -> None:
        self._mover = Mover(owner, engines)
        self._engines = engines
        self._way = way
        self._name = name
        self.moved: Moved | None = None
        self.error = ""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            source = self._engines["source"]
            _running(source, self._name)
            move = Move("source", "target", (self._name,), self._way)  # type: ignore[arg-type]
            self.moved = self._mover.move(move, source.progress().version)
        except EngineError as error:
            self.error = str(error)


def _move(plan: Plan, figures: Figures, engines: dict[str, MigratableSGLangEngine], way: str, response: int) -> None:
    """Move a sample as a rollout would, in the order that the balancer uses."""
    [request] = serving.asked(plan, 1, plan.moved, seed=len(way))  # another prompt, which no cache holds
    moving: list[_OneMove] = []
    pool = EnginePool({"source": engines["source"]})

    def balance(owner: RunningRequests) -> _OneMove:
        moving.append(_OneMove(owner, engines, way, request.id))
        return moving[0]

    pool.balance = balance
    pool.generate([request], Sampling(max_new_tokens=response, ignore_eos=True))
    moved = moving[0].moved
    if moved is None or not moved.ids:
        raise EngineError(moving[0].error or (moved.refused if moved else "") or "the sample stayed")
    note = f"{moved.bytes / 1e9:.2f} GB, KV cache of {moved.kept} sample kept; {moved.refused or 'nothing refused'}"
    figures.say(f"a move, {way}", moved.ms, "ms", note)
    figures.say(f"a move, {way}: away", moved.away_ms, "ms", "neither engine decodes the sample")
