"""A machine with Transformer Engine, played by a CPU: Python imports this module where this folder is on PYTHONPATH.

The layers in `transformer_engine/` then take the place of NVIDIA's, in this process and in all that it starts. The
package believes that it has a GPU as far as that decides which layers it builds and how it initialises them.
"""

import importlib.machinery
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles its fused functions: half a minute each on a CPU


def _gpu_branch(runtime):
    options = runtime.device_options

    def as_on_a_gpu():
        return options() | {"use_cpu_initialization": False, "bias_dropout_fusion": True, "batch_p2p_sync": True}

    runtime.has_transformer_engine = lambda: True
    runtime.device_options = as_on_a_gpu


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "megatron_rlspec.train.runtime":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _gpu_branch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
