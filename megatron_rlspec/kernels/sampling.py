"""Sample tokens from raw logits by the kernels of `keyed_draw.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_rlspec.kernels import keyed_draw

BLOCK = 1024  # columns of a tile; a thread holds 8, and two tiles at once
STAIRS = 32  # in a list
PARTS = 16  # of a row, if there are few rows; more rows fill a GPU in FEWER parts
FEWER = 2  # each number of parts is compiled, and an engine's batch takes all sizes
WARPS = {"scan": 4, "choose": 8}
# Of a thread. Without a limit, Triton 3.8 keeps both kernels to 64 or 96 registers and spills the rest.
MOST_REGISTERS = 128
PROGRAMS = 512  # that fill a GPU: four on each of 132 multiprocessors


def launch_options(kernel: str) -> dict[str, int]:
    """Return how `scan` or `choose` is compiled."""
    return {"num_warps": WARPS[kernel], "maxnreg": MOST_REGISTERS}


@dataclass(frozen=True)
class Draws:
    """How the tokens of N rows are drawn, for B requests of N / B rows each. All are on the device of the logits.

    seeds [B] int64, positions [N] integers; temperatures [B] or [B, 1], positive; top_ks [B] integers, the size of the
    vocabulary or more for none; top_ps [B], 1 for none; min_ps [B], 0 for none; sharpness [B] or [B, 1]. None: no
    limit, and a sharpness of 1. words [V]: the token ids of the columns; None: column i is token i.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_ks: Tensor | None = None
    top_ps: Tensor | None = None
    min_ps: Tensor | None = None
    sharpness: Tensor | None = None
    words: Tensor | None = None

    @property
    def limited(self) -> bool:
        """Whether a row may have a limit."""
        return not (self.top_ks is None and self.top_ps is None and self.min_ps is None)


class _KernelCall:
    """One call: logits [N, V], and what the kernels hand on."""

    def __init__(self, logits: Tensor, draws: Draws) -> None:
        if logits.stride(1) != 1:
            raise ValueError(
                f"logits have a stride of {logits.stride(1)} between columns; expected 1"
            )
        self.draws = draws
        self.device = logits.device
        self.rows, width = logits.shape
        tiles = triton.cdiv(width, BLOCK)
        parts = PARTS if self.rows * FEWER < PROGRAMS else FEWER
        self.parts = min(parts, triton.next_power_of_2(tiles))
        requests = draws.seeds.shape
        top_ks = draws.top_ks
        if top_ks is None:
            top_ks = torch.full(requests, width, dtype=torch.int32, device=self.device)
        top_ps = draws.top_ps
        if top_ps is None:
            top_ps = torch.ones(requests, device=self.device)
        min_ps = draws.min_ps
        if min_ps is None:
            min_ps = torch.zeros(requests, device=self.device)
        sharpness = draws.sharpness
        if sharpness is None:
            sharpness = torch.ones(requests, device=self.device)
        limits: dict[str, Any] = {
            "top_ks": top_ks,
            "top_ps": top_ps,
            "min_ps": min_ps,
            "width": width,
            "nodes": self.rows // len(draws.seeds),
            "STAIRS": STAIRS,
        }
        read = {
            "logits": logits,
            "stride": logits.stride(0),
            "temperatures": draws.temperatures.reshape(-1).float(),
            "BLOCK": BLOCK,
        }
        noise = {
            "seeds": draws.seeds,
            "positions": draws.positions,
            "sharpnesses": sharpness.reshape(-1).float(),
            "words": logits if draws.words is None else draws.words,  # not read without words
            "MAPPED": draws.words is not None,
        }
        part = {"columns_of_part": triton.cdiv(tiles, self.parts) * BLOCK}
        self._of_scan = limits | read | noise | part | launch_options("scan")
        self._of_merge = limits
        self._of_sums = limits | read | part
        self._of_choice = limits | read | noise | launch_options("choose")

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _list(self, prefix: str, *shape: int) -> dict[str, Tensor]:
        """Return room for lists of stairs, with their floors, and with the maximum and the sum of a part or a row."""
        return {
            f"{prefix}_z": self._empty(*shape, STAIRS),
            f"{prefix}_column": self._empty(*shape, STAIRS, dtype=torch.int32),
            f"{prefix}_score": self._empty(*shape, STAIRS, dtype=torch.float64),
            f"{prefix}_floor_z": self._empty(*shape),
            f"{prefix}_floor_column": self._empty(*shape, dtype=torch.int32),
            f"{prefix}_peak": self._empty(*shape),
            f"{prefix}_total": self._empty(*shape, dtype=torch.float64),
        }

    def scan(self) -> dict[str, Tensor]:
        """List the stairs of each part: the first read. Returns tensors [N, parts, ...]."""
        lists = self._list("part", self.rows, self.parts)
        keyed_draw.scan[self.rows, self.parts](**lists, PARTS=self.parts, **self._of_scan)
        return lists

    def merge(self, lists: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the list of each row, and the number of stairs in it: tensors [N, ...]."""
        merged = self._list("row", self.rows) | {
            "counts": self._empty(self.rows, dtype=torch.int32)
        }
        parts = lists["part_peak"].shape[1]
        keyed_draw.merge[(self.rows,)](**lists, **merged, PARTS=parts, **self._of_merge)
        return merged

    def add_up(self, merged: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up what comes before each stair, in each part: the second read, of rows with limits only."""
        shape = self.rows, self.parts
        sums = {
            "numbers": self._empty(*shape, STAIRS, dtype=torch.int32),
            "masses": self._empty(*shape, STAIRS, dtype=torch.int64),
            "wholes": self._empty(*shape, dtype=torch.int64),
        }
        if self.draws.limited:
            given = {name: merged[name] for name in ("row_z", "row_column", "row_peak", "counts")}
            keyed_draw.add_up[shape](**given, **sums, PARTS=self.parts, **self._of_sums)
        return sums

    def choose(self, merged: dict[str, Tensor], sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the token [N] int64 and its log-prob [N]."""
        tokens = self._empty(self.rows, dtype=torch.int64)
        logprobs = self._empty(self.rows)
        given = {name: value for name, value in merged.items() if name != "counts"}
        keyed_draw.choose[(self.rows,)](
            **given,
            **sums,
            tokens=tokens,
            logprobs=logprobs,
            PARTS=sums["wholes"].shape[1],
            **self._of_choice,
        )
        return tokens, logprobs


def sample(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw a column [N] int64 of each row of logits [N, V], with its log-prob [N] at the row's temperature.

    The log-prob is of all tokens, whatever the limits are. The host does not wait for the device.
    """
    if not len(logits):
        no_tokens = draws.positions.new_empty(0, dtype=torch.int64)
        return no_tokens, logits.new_empty(0, dtype=torch.float32)
    rows = _KernelCall(logits, draws)
    merged = rows.merge(rows.scan())
    return rows.choose(merged, rows.add_up(merged))
