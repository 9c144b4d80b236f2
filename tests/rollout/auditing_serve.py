"""`rlspec serve` that counts where our hooks would wait for a GPU: python auditing_serve.py FILE <its arguments>.

The engine's tensors count as the GPU's (`host_reads.py`). The audit is on in our functions, and off in SGLang's that
they call. FILE holds, by kind of round, the most reads that one round had at each place.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import emulation
from host_reads import HostReads

from megatron_rlspec.rollout.sglang.http import checks, serve


class Audit:
    """Records the reads of each round, under the kind of the round."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reads = HostReads()
        self.on = False
        self.found: dict[str, Counter[str]] = {}

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        was, self.on = self.on, on
        if was == on:
            yield
            return
        (self.reads.__enter__ if on else lambda: self.reads.__exit__(None, None, None))()
        try:
            yield
        finally:
            (self.reads.__enter__ if was else lambda: self.reads.__exit__(None, None, None))()
            self.on = was

    def within(self, owner: Any, name: str, on: bool) -> None:
        """Switch the audit on or off for the calls of a function; what it takes and returns is on the GPU."""
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.switched(on):
                if on:
                    self.reads.put([tensors_of(value) for value in args])
                result = inner(*args, **kwargs)
                self.reads.put(tensors_of(result))
                return result

        setattr(owner, name, call)

    def round(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(controller: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            missing = controller.gap.open
            self.reads.found.clear()
            with self.switched(True):
                self.reads.put(tensors_of(batch), controller.worker.req_to_token_pool.req_to_token)
                result = inner(controller, batch, *args, **kwargs)
            ran = getattr(result, "rlspec_round", None)
            if ran is not None:
                kind = "off" if ran.config.off else "probe" if ran.drafting is not None else "drafting"
                kind = "start" if kind == "drafting" and missing else kind
                most = self.found.setdefault(kind, Counter({"rounds": 0}))
                most["rounds"] += 1
                for place, count in self.reads.found.items():
                    most[place] = max(most[place], count)
                self.file.with_suffix(".new").write_text(json.dumps(self.found))
                os.replace(self.file.with_suffix(".new"), self.file)
            return result

        return run


def tensors_of(value: Any, depth: int = 3) -> list[torch.Tensor]:
    """Return the tensors that an object of SGLang holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, str | int | float | type(None)) or callable(value):
        return []
    parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors_of(part, depth - 1)]


def streams() -> None:
    """Let copies on a stream of its own run on a machine without streams."""
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event, synchronize=lambda: None)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda *_: None


def install(audit: Audit) -> None:
    from sglang.srt.layers import sampler
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    from megatron_rlspec.rollout.sglang.scheduler import control, controller, token_filter, verifier, versions

    streams()
    token_filter.CUT = 16  # of 160 words, so that a nucleus may be wider
    ours = controller.ScheduleController
    ours._round = audit.round(ours._round)
    for owner, name in ((ours, "_extend_unless_off"), (verifier, "sample_targets"), (verifier, "_sample_filtered")):
        audit.within(owner, name, on=True)
    after = control._after_decode

    def decoded(original: Callable, processor: Any, batch: Any, result: Any) -> Any:
        def uncounted(*args: Any) -> Any:
            with audit.switched(False):
                return original(*args)

        with audit.switched(True):
            return after(uncounted, processor, batch, result)

    control._after_decode = decoded
    inner = ours.__init__

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        for name in ("_forward", "_extend", "_activate"):
            audit.within(self, name, on=False)

    ours.__init__ = started
    audit.within(versions.Sglang0523, "forward", on=False)
    audit.within(versions.Sglang0523, "softmax", on=False)
    audit.within(EagleDraftWorker, "_draft_extend_for_prefill", on=False)
    audit.within(EAGLEWorkerV2, "_stub_skipped_draft_extend", on=False)
    audit.within(sampler, "multinomial_with_seed", on=False)


if __name__ == "__main__":
    os.environ.update(checks.installed_sglang().cpu_environment)
    serve._install_stand_ins()
    audit = Audit(Path(sys.argv[1]))
    load = serve._fork_children

    def then_install() -> None:
        load()
        emulation.install(emulation.asked())
        install(audit)

    with mock.patch.object(serve, "_fork_children", then_install):
        serve.main(sys.argv[2:])
