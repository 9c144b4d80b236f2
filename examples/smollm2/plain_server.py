"""Show that SGLang's own server takes a model directory as it is, drafter included, on a machine without a GPU.

`python examples/smollm2/plain_server.py MODEL` starts SGLang's server as this command does on a GPU:

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm NEXTN --speculative-num-steps 3 \\
        --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

Two things differ: plain torch operators stand in for the GPU kernels, and only the files of this model's classes are
imported. Nothing else of this package is active. A chat request is sent to the server, and its answer and the accept
length are printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import urllib.error
import urllib.request
from multiprocessing.process import BaseProcess

from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.rollout.sglang.http import plugin, serve
from megatron_rlspec.rollout.sglang.scheduler import versions

CHAT = "Ask one question about a garden."


def serve_model(model: str, port: int, dtype: str) -> None:
    """Run SGLang's server in this process. Does not return."""
    sglang = versions.installed()
    os.environ.update(sglang.cpu_environment)
    serve._install_stand_ins()
    plugin._register_models(serve._architectures(model))
    sglang.prepare_cpu()
    serve._fork_children()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    arguments = [f"--model-path={model}", f"--port={port}", "--speculative-algorithm=NEXTN"]
    arguments += ["--speculative-num-steps=3", "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=4"]
    arguments += ["--device=cpu", f"--dtype={dtype}", "--sampling-backend=pytorch", "--skip-server-warmup"]
    arguments += ["--max-running-requests=8", "--max-total-tokens=4096", "--log-level=warning"]
    launch_server(prepare_server_args([*arguments, *serve._CPU_ARGUMENTS, *sglang.cpu_arguments]))


def ask(server: BaseProcess, port: int, path: str, body: dict) -> dict:
    """Return the answer of the server to a POST request; waits until it listens, or exits if the server has ended."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(request, timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            if not server.is_alive():
                raise SystemExit(f"the server ended with exit code {server.exitcode}") from None
            time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    port = free_port(ENGINES)
    server = multiprocessing.get_context("spawn").Process(
        target=serve_model, args=(options.model, port, options.dtype), daemon=False
    )
    server.start()
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": CHAT}], "max_tokens": 32, "temperature": 0}
        said = ask(server, port, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        print(f"SGLang's own server, NEXTN with 3 drafts: {CHAT!r} -> {said!r}")
        about = {"text": f"{CHAT}\n", "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
        found = ask(server, port, "/generate", about)["meta_info"]
        rounds = found["spec_verify_ct"]
        print(f"{found['completion_tokens']} tokens in {rounds} rounds: accept length {64 / rounds:.2f}")
    finally:
        server.terminate()
        server.join(20)
        server.kill()


if __name__ == "__main__":
    main()
