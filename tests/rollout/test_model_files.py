"""What processes of an engine import: the files of their own model, not all 250."""

import os
import subprocess
import sys

import pytest

from megatron_rlspec.rollout.sglang.settings import Settings

# As in a scheduler that was spawned, which is how SGLang starts it on a GPU.
SPAWNED = """
import sys
from megatron_rlspec.rollout.sglang.cpu import stand_ins
stand_ins.install()
from megatron_rlspec.rollout.sglang.http import plugin
plugin._add_routes = lambda extensions: None
plugin.register()
from sglang.srt.models.registry import ModelRegistry
found, _ = ModelRegistry.resolve_model_cls(["MiMoForCausalLM"])
print(found.__name__, sum(name.startswith("sglang.srt.models.") for name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("architectures", "most"), [(("MiMoForCausalLM",), 12), ((), 400)])
def test_a_spawned_scheduler_imports_the_files_of_its_model(architectures, most):
    variables = Settings("target_only", architectures=architectures).to_environment()
    variables |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "concurrent",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SPAWNED], capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr[-2000:]
    name, files = done.stdout.split()[-2:]
    assert name == "MiMoForCausalLM" and most // 4 < int(files) <= most
