"""Malformed HTTP requests to a real engine: a 4xx, one sentence in JSON, and the engine still serves its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import requests
import tiny_mimo
import torch
from safetensors.torch import save

from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.types import Prompt, Request, Sampling

pytestmark = pytest.mark.slow  # tests/rollout/test_schemas.py has the same rules without an engine
CONFIG = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=160)
WEIGHTS = tiny_mimo.weights(CONFIG)
SERVE = "--device cpu --dtype float32 --candidate-steps 0,1,2,3 --max-total-tokens 4096 --max-running-requests 16"
NORM = "model.norm.weight"
BUCKET = "weights/bucket?session=SESSION"


class Server:
    """An engine, and what proves that it still serves the weights that it started with."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.engine = SGLangEngine.of(process, timeout=60)
        self.headers = {"Authorization": f"Bearer {process.api_key}"}
        self.text = self.draw()

    def draw(self) -> list[int]:
        sampling = Sampling(max_new_tokens=6, ignore_eos=True)
        return self.engine.generate([Request("alive.", Prompt(0, np.arange(3, 9)), 7)], sampling)[0].response.tolist()

    def post(self, path: str, **options: object) -> requests.Response:
        return requests.post(f"{self.process.url}{path}", headers=self.headers, timeout=60, **options)

    def begin(self) -> str:
        return self.post("/rlspec/weights/begin?scope=all&version=0").json()["session"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("malformed")
    model = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    environment = {"OMP_NUM_THREADS": "1"}
    with launch(model, folder / "log", arguments=SERVE.split(), environment=environment) as process:
        process.wait()
        yield Server(process)


def refusal(answer: requests.Response, status: int) -> str:
    """The sentence of a refused request."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text[:300]}"
    (told,) = answer.json().values()
    assert "\n" not in told and "Traceback" not in told and "pydantic" not in told
    return told


def asked(**changes: object) -> dict[str, object]:
    return {"requests": [{"id": "a", "input_ids": [11], "sampling": {"max_new_tokens": 4}} | changes]}


def of_schedule(**changes: object) -> dict[str, object]:
    return {"schedule": {"batch_edges": [1], "context_edges": [0], "configs": [[[1, 1, 2]]]} | changes}


RULE = "control/set_spec_rule"
SCHEDULE = "control/set_schedule"
JOIN = {"address": "127.0.0.1", "port": 9, "size": 2, "group": "rlspec-a", "backend": "gloo"}
CASES = [
    ("generate", b"\xff\xfe{}", "the body is not JSON"),
    ("generate", asked(input_ids=[11, 160]), "input_ids[1] is 160"),
    ("generate", asked(sampling={"stop": ["a"]}), "sampling.stop needs a tokenizer"),
    ("control/hold", {}, "reason is missing"),
    (SCHEDULE, of_schedule(configs=[[[4, 1, 5]]]), "cannot run k4; it was launched with"),
    (RULE, {"spec_rule": {}}, "expected exactly one of table, roofline, schedule"),
    (RULE, {"spec_rule": {"table": "/no/such/file.json"}}, "No such file"),
    (BUCKET, save({"model.norm.weigth": torch.ones(64)}), "did you mean model.norm.weight?"),
    (BUCKET, save({NORM: torch.ones(8, 8)}), "is [8, 8], but the engine's is [64]"),
    ("weights/join?session=SESSION", JOIN, "cannot connect to the trainer at 127.0.0.1:9: Connection refused"),
    (
        "weights/receive?session=SESSION",
        {"group": "rlspec-a", "names": [NORM], "dtypes": ["float32"], "shapes": [[3]]},
        "but the engine's is [64]",
    ),
    (
        "weights/handle?session=SESSION",
        {"handle": "A" * 86 + "==", "names": [NORM], "dtypes": ["float32"], "shapes": [[64]]},
        "this engine, on cpu, opens no memory of a GPU; push with push.transport=http",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), CASES, ids=[words.replace(" ", "-") for *_, words in CASES])
def test_a_malformed_request_is_refused_in_one_sentence(server: Server, path: str, body: object, words: str) -> None:
    session = server.begin() if "SESSION" in path else ""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.post(f"/rlspec/{path.replace('SESSION', session)}", data=sent)
    if session:
        server.post(f"/rlspec/weights/abandon?session={session}")
    assert words in refusal(answer, 400)


def test_nothing_of_that_changed_a_weight_or_the_text(server: Server) -> None:
    assert server.draw() == server.text
    assert server.engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}


def test_routes_methods_keys_and_other_sites(server: Server) -> None:
    url = server.process.url
    assert "Bearer KEY" in refusal(requests.post(f"{url}/rlspec/generate", timeout=30), 401)
    assert requests.get(f"{url}/server_info", timeout=30).status_code == 401
    told = requests.get(f"{url}/server_info", headers=server.headers, timeout=30).text
    assert server.process.api_key not in told
    page = requests.get(f"{url}/health", headers={"Origin": "http://other.example"}, timeout=30)
    assert not any("access-control" in name.lower() for name in page.headers)
