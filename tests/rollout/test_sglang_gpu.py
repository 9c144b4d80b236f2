"""SGLang's engine on a GPU, with the tiny MiMo and the checks of test_sglang_engine.py: captured CUDA graphs, overlap.

In float32, with SGLang's plain torch operators and exact dot products, so that texts are equal and not only similar.
Attention runs in Triton: SGLang's other backends have no float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import test_sglang_engine as same
import test_sglang_overlap as overlap
import tiny_mimo
import torch
from test_sglang_engine import CONFIG, WEIGHTS, texts

from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Handles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KEY = "right-key"
EXACT = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch", "TRITON_F32_DEFAULT": "ieee"}
SERVE = ["--device", "cuda", "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32"]
SERVE += ["--attention-backend", "triton", "--grammar-backend", "none", "--disable-prefill-cuda-graph"]
SERVE += ["--mem-fraction-static", "0.2", "--log-level", "info"]
Engines = dict[str, SGLangEngine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mimo.write(tmp_path_factory.mktemp("tiny") / "mimo", CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def processes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineProcess]]:
    logs = tmp_path_factory.mktemp("logs")
    started: dict[str, EngineProcess] = {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RLSPEC_API_KEY", KEY)
        try:
            for name, arguments in same.LAUNCHES.items():
                options = [*SERVE, *arguments]
                started[name] = launch(checkpoint, logs / f"{name}.log", arguments=options, environment=EXACT)
            for process in started.values():
                process.wait(300)
            yield started
        finally:
            for process in started.values():
                process.close()


@pytest.fixture(scope="module")
def engines(processes: dict[str, EngineProcess]) -> Engines:
    return {name: SGLangEngine.of(process, timeout=120) for name, process in processes.items()}


def test_rounds_overlap_and_run_in_captured_graphs(engines: Engines, processes: dict[str, EngineProcess]) -> None:
    for name, engine in engines.items():
        answer = requests.get(f"{engine.url}/server_info", headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
        assert answer.json()["disable_overlap_schedule"] is False
        assert "graph end" in processes[name].log.read_text(), f"{name} captured no CUDA graph"


@pytest.mark.lossless
@pytest.mark.parametrize("name", same.SAMPLINGS)
def test_text_does_not_depend_on_speculation(engines: Engines, name: str) -> None:
    same.test_text_does_not_depend_on_speculation(engines, name)


@pytest.mark.parametrize(
    "check",
    [
        same.test_the_identity_test_detects_a_sampler_that_is_not_keyed,
        same.test_drafting_after_off_equals_drafting_after_step_0,
        overlap.test_a_probe_lets_some_drafters_catch_up_and_drafting_lets_all,
        overlap.test_a_later_turn_finds_no_hole_in_the_drafters_cache,
        same.test_pushed_weights_are_the_served_ones,
        same.test_samples_continue_under_new_weights,
        same.test_abort,
        same.test_round_statistics_agree_with_the_samples,
        same.test_the_canary_finds_a_wrong_drafter_that_fingerprints_cannot,
        overlap.test_rounds_of_finished_requests_do_not_count,
        overlap.test_prompts_enter_the_prefix_tree_while_off,
        overlap.test_each_token_is_drawn_under_the_weights_that_its_span_names,
    ],
    ids=lambda check: check.__name__[5:],
)
def test_results_are_those_of_the_cpu(engines: Engines, check: Callable[[Engines], None]) -> None:
    check(engines)


def test_a_drafter_left_out_of_a_push_is_named_and_does_not_draft(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    same.test_a_drafter_left_out_of_a_push_is_named_and_does_not_draft(engines, caplog)


def test_logprobs_are_those_of_an_independent_model(engines: Engines, checkpoint: Path) -> None:
    same.test_logprobs_are_those_of_an_independent_model(engines, checkpoint)


@pytest.mark.parametrize("way", ["handles", "group"])
def test_weights_on_the_gpu_arrive_by_every_transport(processes: dict[str, EngineProcess], way: str) -> None:
    """HTTP is the transport of the other tests."""
    transport = GroupBroadcast(backend="gloo") if way == "group" else Handles()
    engine = SGLangEngine.of(processes["adaptive"], timeout=120, transport=transport)
    pushed = {name: (tensor * 1.01).cuda() for name, tensor in WEIGHTS.items()}
    try:
        engine.update_weights(7, pushed.items())
        assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in pushed.items()}
        before = texts(engine.generate(same.requests(4), same.SAMPLINGS["T=1"]))
    finally:
        engine.update_weights(0, WEIGHTS.items())
    assert before != texts(engine.generate(same.requests(4), same.SAMPLINGS["T=1"]))
