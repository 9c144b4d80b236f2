"""slime's own weight updates into an engine that slime's own code launched, on the CPU: which faults are found."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
import tiny_eagle3
import tiny_mimo
import torch
from small_eagle3 import SHAPE, write_drafter
from test_slime import HERE, PYTHON, environment, pytestmark, run  # noqa: F401
from test_slime_eagle3 import STAGES

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.integrations.slime.engines import SlimeEngine, after_push, drafter_test
from megatron_rlspec.integrations.slime.speculation import SlimeDraftRule
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.push.fingerprint import fingerprints
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import RoundStats, Sampling, SpecConfig


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
@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_slimes_update_is_checked_and_a_stale_drafter_is_reported(engine, way):
    """Two train ranks push by slime's updater: complete; a drafter tensor left out once, then twice; a target's."""
    check(run("pushed", 2, way, engine.url.rpartition(":")[2]))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_an_eagle3_drafter_is_pushed_beside_slimes_model_and_checked(eagle3, way, stages):
    engine, options = eagle3
    given = (way, engine.url.rpartition(":")[2], *options)
    if stages == 1:
        check(run("pushed", 2, *given))
    else:
        check(run("pushed", 1, *given, *STAGES, replicas=2))


def check(pushes):
    whole, healed, lasting, released, stopped = pushes
    assert whole[0]["health/incidents"] == whole[0]["health/unchecked_engines"] == 0
    assert whole[0]["health/engines_by_delivery"] == 0
    assert [version for *_, version in (whole, healed, lasting, released, stopped)] == [1, 2, 3, 4, 5]
    assert (healed[0]["health/incidents"], healed[0]["health/plain_engines"]) == (1, 0)
    assert (lasting[0]["health/incidents"], lasting[0]["health/plain_engines"]) == (1, 1)
    assert not any(error for _, error, _ in (whole, healed, lasting, released))
    assert released[0]["health/plain_engines"] == 0
    assert stopped[1].endswith("fingerprint: holds otherwise model.norm.weight"), stopped[1]


@pytest.mark.timeout(1800)
def test_the_canary_sees_an_eagle3_drafter_that_was_exported_wrongly(tmp_path):
    """The engine holds what was sent, so fingerprints agree. Acceptance falls, since this drafter knew the policy."""
    config, own = tiny_eagle3.target_config(), tiny_eagle3.drafter_config()
    target, drafter = tiny_eagle3.agreeing(tiny_eagle3.target_weights(config), tiny_eagle3.drafter_weights(own))
    swapped = dict(drafter)  # what the attention reads of embedding and hidden state, side by side
    for name in "qkv":
        halves = drafter[f"midlayer.self_attn.{name}_proj.weight"].chunk(2, 1)
        swapped[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat(halves[::-1], 1)
    places = [
        tiny_eagle3.write(tmp_path / name, *model)
        for name, model in {"a": (config, target), "b": (own, drafter)}.items()
    ]
    learning = Learning([0, 1, 2], Roofline.of_layers(8))
    learning.observe([RoundStats(SpecConfig(2), 8, 800, 600, 900.0, (100, 100, 200))], [])
    speculation = SlimeDraftRule(learning, [SpecConfig(1), SpecConfig(2)], HealthSettings(canary_share=1.0))
    prompts = [[3 + (i * 7 + j) % 150 for j in range(6)] for i in range(16)]
    with served(tmp_path, *places) as engine:
        found = []
        for version, model in enumerate((drafter, swapped, drafter), start=1):
            sent = target | tiny_eagle3.pushed(model)
            engine.update_weights(version, sent.items())
            marks = dict(zip(sent, fingerprints(sent.values()), strict=True))
            health = after_push([engine.url], marks, version, drafter_test(*map(str, places)))
            assert health["health/incidents"] == health["health/unchecked_engines"] == 0
            found.append(speculation.canary([engine.url], prompts, Sampling(temperature=0)))
            assert bool(engine.describe()["held"]) == (model is swapped)
    assert [canary["health/canary_failures"] for canary in found] == [0, 1, 0]
    assert found[0]["health/canary_accept_length"] == found[2]["health/canary_accept_length"] > 1.8
