"""Start SGLang's own server on a CPU, in any version that is importable: `python plain_server.py MODEL PORT ...`.

The plugin is active if RLSPEC_SGLANG is set, as in a server that slime starts. `rlspec serve` is not used. The other
arguments are SGLang's. `started` runs it from a test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine

HERE = Path(__file__).parent


@contextmanager
def started(
    model: Path, folder: Path, settings: str, more: Sequence[str] = (), path: Sequence[str] = ()
) -> Iterator[SGLangEngine]:
    """Run a server with at most two drafts a round and RLSPEC_SGLANG=`settings`, until the block ends.

    path  folders that Python searches first. The log is FOLDER/log.
    """
    port = free_port(ENGINES)
    environment = os.environ | {"TMPDIR": str(folder), "RLSPEC_SGLANG": settings}
    inherited = os.environ.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(HERE.parent.parent), inherited])
    command = [sys.executable, "-W", "ignore", str(HERE / "plain_server.py"), str(model), str(port), *more]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    engine = SGLangEngine(f"http://127.0.0.1:{port}", timeout=300)
    try:
        while not answers(engine):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield engine
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def answers(engine: SGLangEngine) -> bool:
    try:
        engine.describe()
    except EngineError:
        return False
    return True


def main(model: str, port: str, *more: str) -> None:
    from megatron_rlspec.rollout.sglang.http import plugin, serve
    from megatron_rlspec.rollout.sglang.scheduler import versions

    sglang = versions.installed()
    os.environ.update(sglang.cpu_environment)
    serve._install_stand_ins()
    plugin._register_models(serve._architectures(model))
    sglang.prepare_cpu()
    serve._fork_children()
    adaptive = Path(model, "adaptive.json")
    adaptive.write_text(json.dumps({"1": {"candidate_steps": [0, 1, 2]}}))

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = [f"--model-path={model}", f"--port={port}", "--device=cpu", "--dtype=float32"]
    if not Path(model, "tokenizer.json").is_file():
        arguments.append("--skip-tokenizer-init")
    arguments += ["--sampling-backend=pytorch", "--max-running-requests=8", "--max-total-tokens=2048"]
    arguments += ["--speculative-algorithm=EAGLE", "--speculative-num-steps=2", "--speculative-eagle-topk=1"]
    arguments += ["--speculative-num-draft-tokens=3", "--weight-version=0", "--log-level=info"]
    arguments += ["--speculative-adaptive", f"--speculative-adaptive-config={adaptive}", "--skip-server-warmup"]
    launch_server(prepare_server_args([*arguments, *serve._CPU_ARGUMENTS, *sglang.cpu_arguments, *more]))


if __name__ == "__main__":
    main(*sys.argv[1:])
