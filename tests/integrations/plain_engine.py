"""Start an SGLang server as slime does, on a CPU: `python plain_engine.py MODEL PORT [DRAFTER]`.

RLSPEC_SGLANG is set. slime's own `_compute_server_args` and `launch_server_process` start it. Every spawned process
imports this file, so the CPU stand-ins for a GPU are installed in each.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from megatron_rlspec.rollout.sglang.http import plugin, serve

MODEL, PORT = sys.argv[1:3]
serve._install_stand_ins()
plugin._register_models(serve._architectures(MODEL))
serve._fork_children()

from sglang.srt.arg_groups import arg_utils, attention_hook  # noqa: E402

attention_hook._attention_backend_platform_fallbacks = lambda view: {}

DRAFTER = sys.argv[3:]  # directory of an EAGLE-3 drafter; none: the model's MTP layer drafts
SGLANG = {
    "speculative_algorithm": "EAGLE3" if DRAFTER else "EAGLE",
    "speculative_draft_model_path": DRAFTER[0] if DRAFTER else None,
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
    "speculative_adaptive": True,
    "speculative_adaptive_config": str(Path(MODEL, "adaptive.json")),
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "intel_amx",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "skip_tokenizer_init": True,
    "max_running_requests": 8,
    "max_total_tokens": 4096,
    "weight_version": "0",
    "log_level": "warning",
}


def by_slime():
    import slime_cpu
    from slime.backends.sglang_utils import sglang_engine
    from slime.utils import accelerator

    accelerator.set_accelerator(slime_cpu.CpuAccelerator())
    # slime expects SGLang's arguments as a dataclass. From SGLang 0.5.23 on, they are none.
    sglang_engine.dataclasses = SimpleNamespace(fields=arg_utils.record_fields)
    args = SimpleNamespace(
        hf_checkpoint=MODEL,
        seed=1,
        fp16=False,
        num_gpus_per_node=1,
        rollout_num_gpus_per_engine=1,
        offload_rollout=False,
        use_rollout_routing_replay=False,
        sglang_pp_size=1,
        sglang_dp_size=1,
        sglang_ep_size=1,
        **{f"sglang_{name}": value for name, value in SGLANG.items()},
    )
    given, _ = sglang_engine._compute_server_args(
        args, 0, f"127.0.0.1:{int(PORT) + 1}", int(PORT) + 2, "127.0.0.1", int(PORT), base_gpu_id=0
    )
    from sglang.srt.server_args import ServerArgs

    return sglang_engine.launch_server_process(ServerArgs(**given))


if __name__ == "__main__":
    Path(SGLANG["speculative_adaptive_config"]).write_text(json.dumps({"1": {"candidate_steps": [0, 1, 2]}}))
    multiprocessing.set_start_method("spawn", force=True)
    process = by_slime()
    parent = os.getppid()
    while process.is_alive() and os.getppid() == parent:
        time.sleep(0.2)
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid())
