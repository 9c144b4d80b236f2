"""Let SGLang's CPU engine do what it does on GPUs only, so that tests reach those paths of SGLang and of our hooks.

The environment variable `RLSPEC_CPU_EMULATES` of `emulating_serve.py` names the parts, with commas between them:

- `overlap`: the overlap scheduler, SGLang's default on GPUs. The results of a round are processed after the next round
  was launched. SGLang turns it off for speculation on CPUs (`arg_groups/speculative_hook.py`).
- `graphs`: SGLang's runner of CUDA graphs and its FlashAttention run the target (`emulated_graphs.py`). The outputs of
  a pass are views of buffers that the next pass of the same model overwrites. They hold NaN meanwhile, so that a late
  reader is seen.
- `device_lengths`: sequence lengths stay on the device (`seq_lens_cpu` is None), as FlashAttention 3 has it.

Mistakes that tests of uneven rounds must see: `accepts_one_more`, of a request that verifies some of its drafts, and
`accepts_unverified`, of one that verifies none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_graphs
import torch

from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.rollout.sglang.scheduler import ragged

VARIABLE = "RLSPEC_CPU_EMULATES"
PARTS = ("overlap", "graphs", "device_lengths")


def asked() -> list[str]:
    """Return the parts that the environment asks for."""
    return [part for part in os.environ.get(VARIABLE, "").split(",") if part]


def launch(
    model: Path, log: Path, arguments: Sequence[str], environment: Mapping[str, str], api_key: str
) -> EngineProcess:
    """Start an engine that emulates the parts in `environment`, and return at once."""
    port = free_port(ENGINES)
    program = [sys.executable, str(Path(__file__).with_name("emulating_serve.py"))]
    program += ["--model", str(model), "--port", str(port), f"--stop-with-parent={os.getpid()}", *arguments]
    if "graphs" in environment.get(VARIABLE, ""):
        program += emulated_graphs.ARGUMENTS
    with log.open("wb") as output:
        process = subprocess.Popen(
            program,
            env=os.environ | environment | {"RLSPEC_API_KEY": api_key},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return EngineProcess(process, f"http://127.0.0.1:{port}", log, Path(tempfile.mkdtemp()), api_key)


def install(parts: list[str]) -> None:
    """Change SGLang in this process and in those forked from it. Imports SGLang."""
    if "overlap" in parts:
        _allow_overlap()
    if "graphs" in parts:
        emulated_graphs.install()
        _reuse_buffers()
    if "device_lengths" in parts:
        _keep_lengths_on_device()
    if "accepts_one_more" in parts:
        _accept_one_more(lambda lengths: lengths > 0)
    if "accepts_unverified" in parts:
        _accept_one_more(lambda lengths: lengths == 0)


def _allow_overlap() -> None:
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.managers import overlap_utils

    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
    overlap_utils.gather_spec_extras = gather_rows


def gather_rows(indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the rows of each buffer at `indices` [B], in place of a Triton kernel (`gather_spec_extras`)."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def _keep_lengths_on_device() -> None:
    from sglang.srt.managers import overlap_utils, scheduler

    overlap_utils.decide_needs_cpu_seq_lens = scheduler.decide_needs_cpu_seq_lens = lambda backends: False


def _accept_one_more(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let requests with such numbers of verified drafts accept one draft more, if it is right."""
    without_others = ragged.Chosen.without_others

    def wrong(chosen: ragged.Chosen, tokens: torch.Tensor) -> torch.Tensor:
        return without_others(replace(chosen, lengths=chosen.lengths + of(chosen.lengths)), tokens)

    ragged.Chosen.without_others = wrong  # type: ignore[method-assign]


def _reuse_buffers() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def into_buffers(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        buffers = vars(runner).setdefault("_rlspec_buffers", GraphBuffers())
        return buffers.run(forward_batch, lambda: forward(runner, forward_batch, *args, **kwargs))

    ModelRunner.forward = into_buffers


class GraphBuffers:
    """The output buffers of one model's passes, by the name and row shape of the output."""

    NAMES = ("next_token_logits", "hidden_states")

    def __init__(self) -> None:
        self._buffers: dict[tuple, torch.Tensor] = {}

    def run(self, forward_batch: Any, forward: Callable[[], Any]) -> Any:
        """Invalidate what earlier passes returned, run the pass, and return its outputs as views of the buffers."""
        hidden = getattr(forward_batch.spec_info, "hidden_states", None)
        if hidden is not None:  # A graph copies its inputs before it is replayed.
            forward_batch.spec_info.hidden_states = hidden.clone()
        for buffer in self._buffers.values():
            buffer.fill_(float("nan"))
        result = forward()
        output = result.logits_output
        result.logits_output = replace(output, **{name: self._held(name, getattr(output, name)) for name in self.NAMES})
        return result

    def _held(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        key = (name, value.shape[1:], value.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < len(value):
            buffer = self._buffers[key] = value.new_empty(2 * len(value), *value.shape[1:])
        return buffer[: len(value)].copy_(value)
