"""slime's own weight updates into an engine that slime's own code launched, on the CPU: which faults are found."""

import json
import os
import signal
import subprocess
import time

import pytest
import tiny_mimo
from test_slime import HERE, PYTHON, environment, pytestmark, run  # noqa: F401

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.integrations.slime.engines import SlimeEngine

STALE = "model.mtp_layers.0.input_proj.weight"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The model of slime_ranks.py, served."""
    room = tmp_path_factory.mktemp("engine")
    config = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=64)
    model = tiny_mimo.write(room / "model", config, tiny_mimo.weights(config))
    port = free_port(ENGINES)
    plugin = {"verifier": "target_only", "deliveries": True}
    with open(room / "log", "w+") as log:
        process = subprocess.Popen(
            [PYTHON, "-W", "ignore", str(HERE / "plain_engine.py"), str(model), str(port)],
            env=environment() | {"RLSPEC_SGLANG": json.dumps(plugin), "TMPDIR": str(room)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        found = SlimeEngine(f"http://127.0.0.1:{port}")
        try:
            while True:
                try:
                    found.describe()
                    break
                except EngineError:
                    log.seek(0)
                    assert process.poll() is None, log.read()[-3000:]
                    time.sleep(0.5)
            yield found
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(1800)  # the engine's start counts for the first
@pytest.mark.parametrize("way", ["tensor", "distributed", "delivered"])
def test_slimes_update_is_checked_and_a_stale_drafter_is_reported(engine, way):
    """Two train ranks push by slime's updater: complete; a drafter tensor left out once, then twice; a target's."""
    whole, healed, lasting, released, stopped = run("pushed", 2, way, engine.url.rpartition(":")[2])
    assert whole[0]["health/incidents"] == whole[0]["health/unchecked_engines"] == 0
    assert whole[0]["health/engines_by_delivery"] == (way == "delivered")
    assert [version for *_, version in (whole, healed, lasting, released, stopped)] == [1, 2, 3, 4, 5]
    assert (healed[0]["health/incidents"], healed[0]["health/plain_engines"]) == (1, 0)
    assert (lasting[0]["health/incidents"], lasting[0]["health/plain_engines"]) == (1, 1)
    assert not any(error for _, error, _ in (whole, healed, lasting, released))
    assert released[0]["health/plain_engines"] == 0
    assert stopped[1].endswith("may not serve: fingerprint: holds otherwise model.norm.weight"), stopped[1]
