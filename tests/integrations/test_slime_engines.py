"""slime's own weight updates into an engine that slime's own code launched, on the CPU: which faults are found."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
import tiny_mimo
from small_eagle3 import SHAPE, write_drafter
from test_slime import HERE, PYTHON, environment, pytestmark, run  # noqa: F401
from test_slime_eagle3 import STAGES

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.integrations.slime.engines import SlimeEngine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The model of slime_ranks.py, served."""
    room = tmp_path_factory.mktemp("engine")
    with served(room, tiny_mimo.write(room / "model", SHAPE, tiny_mimo.weights(SHAPE))) as found:
        yield found


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    """The same policy as a Qwen2, served with an EAGLE-3 drafter; and the options of a recipe with this drafter."""
    room = tmp_path_factory.mktemp("eagle3")
    weights = {name: x for name, x in tiny_mimo.weights(SHAPE).items() if ".mtp_layers." not in name}
    config = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    model = tiny_mimo.write(room / "model", config, weights)
    drafter = write_drafter(room / "drafter")
    settings = room / "eagle3.yaml"
    settings.write_text(f"rlspec: {{drafter: {{kind: eagle3, path: {drafter}}}}}\n")
    with served(room, model, drafter) as found:
        yield found, ("--custom-config-path", str(settings))


@contextmanager
def served(room, model, *drafter):
    port = free_port(ENGINES)
    plugin = {"verifier": "target_only", "deliveries": True}
    with open(room / "log", "w+") as log:
        process = subprocess.Popen(
            [PYTHON, "-W", "ignore", str(HERE / "plain_engine.py"), str(model), str(port), *map(str, drafter)],
            env=environment() | {"RLSPEC_SGLANG": json.dumps(plugin), "TMPDIR": str(room)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        found = SlimeEngine(f"http://127.0.0.1:{port}")
        try:
            while True:
                try:
                    assert not found.describe()["unnamed"], "pushes are compared with what the engine holds"
                    break
                except EngineError:
                    log.seek(0)
                    assert process.poll() is None, log.read()[-3000:]
                    time.sleep(0.5)
            yield found
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(1800)  # the engine's start counts for the first
@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_slimes_update_is_checked_and_a_stale_drafter_is_reported(engine, way):
    """Two train ranks push by slime's updater: complete; a drafter tensor left out once, then twice; a target's."""
    check(run("pushed", 2, way, engine.url.rpartition(":")[2]))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_an_eagle3_drafter_is_pushed_beside_slimes_model_and_checked(eagle3, way):
    """The drafter is on the last of two pipeline stages."""
    engine, options = eagle3
    check(run("pushed", 1, way, engine.url.rpartition(":")[2], *options, *STAGES, replicas=2))


def check(pushes):
    whole, healed, lasting, released, stopped = pushes
    assert whole[0]["health/incidents"] == 0
    assert [version for *_, version in (whole, healed, lasting, released, stopped)] == [1, 2, 3, 4, 5]
    assert (healed[0]["health/incidents"], healed[0]["health/plain_engines"]) == (1, 0)
    assert (lasting[0]["health/incidents"], lasting[0]["health/plain_engines"]) == (1, 1)
    assert not any(error for _, error, _ in (whole, healed, lasting, released))
    assert released[0]["health/plain_engines"] == 0
    assert stopped[1].endswith("fingerprint: holds otherwise model.norm.weight"), stopped[1]
