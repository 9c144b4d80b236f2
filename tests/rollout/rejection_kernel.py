"""Run SGLang's kernels of rejection sampling in Triton's interpreter: `python rejection_kernel.py FOLDER`.

FOLDER/cases-*.npz are verified, and become FOLDER/result-*.npz. From FOLDER/logits.npz drafts are drawn, for
FOLDER/drafts.npz. The interpreter is chosen when Triton is imported, so this is a process of its own.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from megatron_rlspec.rollout.sglang.cpu import stand_ins

stand_ins.install()
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton  # noqa: E402
from sglang.srt.speculative import spec_utils  # noqa: E402


def verify(cases: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    count, slots = cases["candidates"].shape
    tokens = torch.full((count * slots,), -1, dtype=torch.int32)
    accepted_at = torch.full((count, slots), -1, dtype=torch.int32)
    accepted = torch.full((count,), -1, dtype=torch.int32)
    nodes = torch.arange(count * slots, dtype=torch.int64).view(count, slots)
    nothing = torch.empty(0)
    chain_speculative_sampling_triton(
        tokens, accepted_at, accepted, cases["candidates"], nodes, nothing, nothing,
        cases["coins"], cases["last_coins"], cases["p"], cases["q"], 1.0, 1.0, True,
    )  # fmt: skip
    return {"tokens": tokens.view(count, slots), "accepted_at": accepted_at, "accepted": accepted}


def draft(logits: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
    """Draw a draft for each row. SGLang's argmax is a kernel, too, of a second a row here: few rows have it."""
    torch.manual_seed(0)
    one = torch.full((1, 1), temperature)
    greedy = spec_utils.sample_draft_proposal(logits[:1], one, torch.ones(1, dtype=torch.int64))[2]
    values = torch.rand(3, logits.shape[1])
    largest = spec_utils.row_argmax(values)
    spec_utils.row_argmax = lambda scores: scores.argmax(-1)
    q, of_draft, drafts = spec_utils.sample_draft_proposal(logits, one.expand(len(logits), 1))
    return {"q": q, "of_draft": of_draft, "drafts": drafts, "greedy": greedy, "values": values, "largest": largest}


folder = Path(sys.argv[1])
for path in folder.glob("cases-*.npz"):
    found = verify({name: torch.from_numpy(array) for name, array in np.load(path).items()})
    np.savez(folder / path.name.replace("cases", "result"), **found)
given = np.load(folder / "logits.npz")
np.savez(folder / "drafts.npz", **draft(torch.from_numpy(given["logits"]), float(given["temperature"])))
