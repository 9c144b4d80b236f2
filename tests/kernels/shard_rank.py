"""Draw where the columns lie on two ranks, in Triton's interpreter: `python shard_rank.py RANK FOLDER`.

FOLDER/given.npz has the arrays of whole rows, and `stairs`. Writes FOLDER/RANK.npz.
"""

import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from interpreted import interpreter

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
arrays = dict(np.load(folder / "given.npz"))
sizes = {"BLOCK": 16, "PARTS": 2, "STAIRS": int(arrays.pop("stairs"))}
width = arrays["logits"].shape[1] // 2
mine = slice(rank * width, (rank + 1) * width)
arrays["logits"] = arrays["logits"][:, mine]
arrays["words"] = arrays["words"][mine]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
with interpreter() as kernel, np.errstate(all="ignore"):
    tokens, logprobs = kernel.sampling.sample_shards(*kernel.given(sizes, arrays), dist.group.WORLD)
np.savez(folder / f"{rank}.npz", tokens=tokens.numpy(), logprobs=logprobs.numpy())
dist.destroy_process_group()
