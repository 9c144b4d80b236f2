"""Start SGLang's own server on a CPU, in any version that is importable: `python plain_server.py MODEL PORT STEPS`.

The plugin is active if RLSPEC_SGLANG is set, as in a server that slime starts. `rlspec serve` is not used.
"""

import json
import os
import sys
from pathlib import Path

from megatron_rlspec.rollout.sglang.http import plugin, serve
from megatron_rlspec.rollout.sglang.scheduler import versions

if __name__ == "__main__":
    model, port, steps = sys.argv[1:]
    sglang = versions.installed()
    os.environ.update(sglang.cpu_environment)
    serve._install_stand_ins()
    plugin._register_models(serve._architectures(model))
    sglang.prepare_cpu()
    serve._fork_children()
    adaptive = Path(model, "adaptive.json")
    adaptive.write_text(json.dumps({"1": {"candidate_steps": list(range(int(steps) + 1))}}))

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = [f"--model-path={model}", f"--port={port}", "--device=cpu", "--dtype=float32", "--skip-tokenizer-init"]
    arguments += ["--sampling-backend=pytorch", "--max-running-requests=8", "--max-total-tokens=2048"]
    arguments += ["--speculative-algorithm=EAGLE", f"--speculative-num-steps={steps}", "--speculative-eagle-topk=1"]
    arguments += [f"--speculative-num-draft-tokens={int(steps) + 1}", "--weight-version=0", "--log-level=info"]
    arguments += ["--speculative-adaptive", f"--speculative-adaptive-config={adaptive}", "--skip-server-warmup"]
    launch_server(prepare_server_args([*arguments, *serve._CPU_ARGUMENTS, *sglang.cpu_arguments]))
