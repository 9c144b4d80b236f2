"""`rlspec serve` that writes down every pass of SGLang's drafter: DIR/N.npz with input_ids, positions, logits, mode.

Run as `python capturing_serve.py DIR <arguments of rlspec serve>`. The scheduler is forked on a CPU, so what is wrapped
here is wrapped there too.
"""

import itertools
import os
import sys
from pathlib import Path

import numpy as np

from megatron_rlspec.rollout.sglang.server import serve

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    serve._install_stand_ins()
    from sglang.srt.models import mimo_mtp

    inner, count = mimo_mtp.MiMoMTP.forward, itertools.count()

    def forward(self, input_ids, positions, forward_batch):
        output = inner(self, input_ids, positions, forward_batch)
        np.savez(
            folder / f"{next(count):06d}.npz",
            input_ids=input_ids.numpy(),
            positions=positions.numpy(),
            logits=output.next_token_logits.float().numpy(),
            mode=str(forward_batch.forward_mode.name),
        )
        return output

    mimo_mtp.MiMoMTP.forward = forward
    serve.main(sys.argv[2:])
