"""`rlspec train` with an engine on the trainer's devices, as on a node with GPUs: prints the calls that it makes.

MODE=disaggregated in the environment gives the engine devices of its own. LAST names a call that the program ends with.
"""

import os
import sys

from megatron_rlspec import cli
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import ServedEngines
from megatron_rlspec.run import engines, loading, session
from megatron_rlspec.train.step import Trainer


def noted(kind, name):
    inner = getattr(kind, name)

    def call(*arguments, **options):
        print(f"CALL {name}", flush=True)
        if name == os.environ.get("LAST"):
            sys.exit()
        return inner(*arguments, **options)

    setattr(kind, name, call)


if __name__ == "__main__":
    loading.place = lambda config, hf_config, tensors: GpuLayout(os.environ.get("MODE", "colocated"))
    for name in ("generate", "sleep", "wake", "begin_update", "fingerprints"):
        noted(SGLangEngine, name)
    for name in ("load_hf", "train_step"):
        noted(Trainer, name)
    engines.CANARY_PROMPTS = 0
    noted(ServedEngines, "launch")
    noted(session, "_free_memory")
    cli.main()
