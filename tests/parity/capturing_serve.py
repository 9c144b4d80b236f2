"""`rlspec serve` that writes down every pass of SGLang's drafter: DIR/N.npz with input_ids, positions, logits, mode.

It does so until the folder is removed. Run as `python capturing_serve.py DIR <arguments of rlspec serve>`. On a CPU the
scheduler is forked, so what is wrapped here is wrapped there too.
"""

import itertools
import os
import sys
from pathlib import Path

import numpy as np

from megatron_rlspec.rollout.sglang.http import serve

count = itertools.count()


def written(inner, folder):
    def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
        output = inner(self, input_ids, positions, forward_batch, *args, **kwargs)
        if folder.is_dir():
            np.savez(
                folder / f"{next(count):06d}.npz",
                input_ids=input_ids.numpy(),
                positions=positions.numpy(),
                logits=output.next_token_logits.float().numpy(),
                mode=str(forward_batch.forward_mode.name),
            )
        return output

    return forward


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    serve._install_stand_ins()
    from sglang.srt.models import llama_eagle3, mimo_mtp

    for drafter in (mimo_mtp.MiMoMTP, llama_eagle3.LlamaForCausalLMEagle3):
        drafter.forward = written(drafter.forward, folder)
    serve.main(sys.argv[2:])
