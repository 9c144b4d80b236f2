"""A real engine of SGLang 0.5.15.post1 on the CPU: its Triton backend, in Triton's interpreter. Minutes long.

RLSPEC_SGLANG_OLD: directories, separated by colons, with this version and the transformers and others that it needs
(`pip install --no-deps --target DIR sglang==0.5.15.post1 transformers==5.12.1 ...`).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import plain_server
import pytest
import tiny_mimo
import torch.distributed as dist
from taking_turns import generate_in_turns
from test_sglang_engine import k, texts

from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast
from megatron_rlspec.types import OFF, Prompt, Request, Sample, Sampling, SpecConfig

FOLDERS = os.environ.get("RLSPEC_SGLANG_OLD", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FOLDERS, reason="set RLSPEC_SGLANG_OLD to where SGLang 0.5.15.post1 is importable from"),
]
CONFIG = tiny_mimo.config(hidden=64, layers=1, heads=2, kv_heads=1, ffn=128, vocab=160)
WEIGHTS = tiny_mimo.weights(CONFIG)
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--max-running-requests", "8"]
LAUNCHES = {
    "adaptive": ["--spec", "adaptive", "--candidate-steps", "0,1,2,3"],
    "plain": ["--spec", "off"],
    "unkeyed": ["--spec", "fixed", "--num-steps", "3", "--verifier", "target_only"],
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SGLangEngine]]:
    folder = tmp_path_factory.mktemp("old")
    model = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    here = str(Path(__file__).parent.parent.parent)
    environment = {"PYTHONPATH": os.pathsep.join([FOLDERS, here])}
    processes = {
        name: launch(model, folder / f"{name}.log", arguments=[*SERVE, *arguments], environment=environment)
        for name, arguments in LAUNCHES.items()
    }
    try:
        yield {name: SGLangEngine.of(process.wait(), timeout=600) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.close()


def requests(n: int, tag: str) -> list[Request]:
    drawn = np.random.default_rng(0)
    prompts = [Prompt(i, drawn.integers(3, 160, size)) for i, size in enumerate(drawn.integers(1, 12, n))]
    return [Request(f"{tag}-{i:03d}.", prompt, seed=1000 + i) for i, prompt in enumerate(prompts)]


def generate(engine: SGLangEngine, tag: str, n: int = 3, tokens: int = 12, **sampling: float) -> list[Sample]:
    return engine.generate(requests(n, tag), Sampling(max_new_tokens=tokens, ignore_eos=True, **sampling))


def test_text_does_not_depend_on_speculation(engines):
    sampling = {"temperature": 1.0, "top_p": 0.95}
    assert engines["adaptive"].describe()["sglang"] == "0.5.15.post1"
    plain = texts(generate(engines["plain"], "plain", **sampling))
    configs = {"fixed-1": k(1), "fixed-3": k(3), "step-0": k(0), "off": OFF}
    for name, config in configs.items():
        engines["adaptive"].set_config(config)
        engines["adaptive"].stats()
        assert texts(generate(engines["adaptive"], name, **sampling)) == plain, name
        assert {round.config for round in engines["adaptive"].stats()} == {config}, name
    mixed = partial(generate, engines["adaptive"], "mixed", **sampling)
    for samples in generate_in_turns(engines["adaptive"], (OFF, k(2), k(3)), mixed):
        assert texts(samples) == plain
    assert texts(generate(engines["unkeyed"], "unkeyed", **sampling)) != plain


def test_the_pushed_drafter_is_the_one_that_drafts(engines):
    engine = engines["adaptive"]
    engine.set_config(k(3))
    before = generate(engine, "before", temperature=0.0)
    agreeing = tiny_mimo.agreeing(WEIGHTS, CONFIG["vocab_size"])
    engine.update_weights(1, agreeing.items())
    after = generate(engine, "after", tokens=13, temperature=0.0)  # the prefill's, and three rounds that no end cuts
    assert rate(after) == 1.0 > rate(before)
    assert {s.policy_versions for s in after} == {((1, 0, 13),)}
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in agreeing.items()}

    engine.update_weights(2, WEIGHTS.items())
    assert texts(generate(engine, "back", temperature=0.0)) == texts(before)


def rate(samples: list[Sample]) -> float:
    """Return accepted drafts over proposed drafts at three steps."""
    counts = np.sum([np.pad(s.accepted, (0, 4 - len(s.accepted))) for s in samples], axis=0)
    return float(counts @ np.arange(4)) / (3 * counts.sum())


def test_samples_continue_under_new_weights(engines):
    """Requests are waiting while the cache is flushed. Without our hook, SGLang would end."""
    engine = engines["adaptive"]
    done = []
    engine.set_config(k(1))
    thread = threading.Thread(target=lambda: done.extend(generate(engine, "across", n=2, tokens=24)))
    thread.start()
    while not engine.stats():
        pass
    engine.update_weights(5, WEIGHTS.items())
    thread.join(300)
    assert [len(s.response) for s in done] == [24, 24]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Create the trainer's side of transport "group"."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """Start SGLang's own `launch_server` with the plugin active, as in slime's engines."""
    room = tmp_path_factory.mktemp("plain")
    model = tiny_mimo.write(room / "mimo", CONFIG, WEIGHTS)
    settings = {"verifier": "target_only", "num_steps": 2, "deliveries": True}
    with plain_server.started(model, room, json.dumps(settings), path=FOLDERS.split(os.pathsep)) as engine:
        yield engine


def test_the_plugin_alone_in_sglangs_own_server(server, group):
    """Test our controller, our routes, and both models' loaders in an update that SGLang applies to the target only."""
    said = server.describe()
    assert said["sglang"] == "0.5.15.post1" and said["controller"] == "DraftController"
    generate(server, "first", temperature=0.0)
    assert {round.config for round in server.stats()} == {SpecConfig(2)}
    agreeing = tiny_mimo.agreeing(WEIGHTS, CONFIG["vocab_size"])
    SGLangEngine(server.url, timeout=300, transport=GroupBroadcast()).update_weights(1, agreeing.items())
    marks = {name: fingerprint(tensor) for name, tensor in agreeing.items()}
    assert server.fingerprints() == marks
    assert server.post("control/delivered") == {"target": marks, "drafter": marks}
    after = generate(server, "after", tokens=13, temperature=0.0)  # no end cuts a round
    assert sum(sum(s.accepted[:2]) for s in after) == 0, "every draft is accepted"
