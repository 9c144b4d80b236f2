"""The examples of docs/http-api.md, with curl and a real engine."""

import os
import subprocess

import pytest
import tiny_mimo
from docs_pages import DOCS, blocks
from safetensors.torch import save_file

from megatron_rlspec.rollout.sglang.client.launcher import launch

PAGE = "http-api.md"
TABLE = DOCS.parent / "examples/cost_tables/h100-simulated.json"
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "4"]
# Without -s, an answer that is no success would be printed and forgotten.
PRELUDE = 'curl() { command curl --fail-with-body "$@"; echo; }\n'


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    config = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=160)
    weights = tiny_mimo.weights(config)
    model = tiny_mimo.write(tmp_path / "mimo", config, weights)
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: weights[name].contiguous() for name in part}, tmp_path / f"part-{number}.safetensors")
    (tmp_path / "cost.json").write_text(TABLE.read_text())
    arguments = [*SERVE, "--spec", "adaptive", "--candidate-steps", "0,1,2,3"]
    environment = {"OMP_NUM_THREADS": "1"}
    with launch(model, tmp_path / "log", arguments=arguments, environment=environment, api_key="key") as process:
        address = process.wait().url
        examples = "".join(blocks(PAGE, "bash")).replace("http://127.0.0.1:30000", address)
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", PRELUDE + examples],
            cwd=tmp_path,
            env={**os.environ, "RLSPEC_API_KEY": "key"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert '"output_ids"' in ended.stdout and '"verifier":"position_keyed"' in ended.stdout.replace(" ", "")
