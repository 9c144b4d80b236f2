"""Clients of one real engine: updates of weights, ids, bodies that do not come, and malformed ones."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import requests
import tiny_mimo
import torch
import torch.distributed as dist
from safetensors.torch import save

from megatron_rlspec.engine import EngineError
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast
from megatron_rlspec.types import Prompt, Request, Sampling

pytestmark = pytest.mark.slow
CONFIG = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=160)
WEIGHTS = tiny_mimo.weights(CONFIG)
SERVE = "--device cpu --dtype float32 --candidate-steps 0,1,2,3 --max-total-tokens 4096 --max-running-requests 16"
NORM = "model.norm.weight"
LONG = Sampling(max_new_tokens=300, ignore_eos=True)


class Server:
    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.engine = SGLangEngine.of(process, timeout=120)
        self.headers = {"Authorization": f"Bearer {process.api_key}"}

    def post(self, path: str, **options: object) -> requests.Response:
        return requests.post(f"{self.process.url}/rlspec/{path}", headers=self.headers, timeout=60, **options)

    def told(self, path: str, status: int, **options: object) -> str:
        """The sentence of a request that is refused."""
        answer = self.post(path, **options)
        assert answer.status_code == status, answer.text
        (told,) = answer.json().values()
        return told

    def text(self, tokens: int = 12, name: str = "a") -> list[int]:
        return self.engine.generate([sample(name)], Sampling(max_new_tokens=tokens, ignore_eos=True))[
            0
        ].response.tolist()

    def begin(self, scope: str = "all", version: int = 5) -> str:
        return self.post(f"weights/begin?scope={scope}&version={version}").json()["session"]

    def connect(self) -> socket.socket:
        host, port = self.process.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), 60)

    def send(self, path: str, body: bytes, announced: int = 0) -> socket.socket:
        """Send a request and do not read its answer. A larger announced size leaves the request unfinished."""
        connection = self.connect()
        head = f"POST /rlspec/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: {self.headers['Authorization']}\r\n"
        connection.sendall(f"{head}Content-Length: {announced or len(body)}\r\n\r\n".encode() + body)
        return connection

    def rounds(self) -> int:
        """How many decode rounds the engine ran since the last call."""
        return len(self.post("control/stats", json={}).json()["rounds"])


def sample(name: str, tokens: int = 6) -> Request:
    return Request(name, Prompt(0, np.arange(3, 3 + tokens)), 7)


def body(name: str, tokens: int) -> bytes:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 7}
    return json.dumps({"requests": [{"id": name, "input_ids": [3, 4, 5], "sampling": sampling}]}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    model = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    with launch(model, folder / "log", arguments=SERVE.split()) as process:
        yield Server(process.wait())


@contextmanager
def running(server: Server, name: str) -> Iterator[list[int]]:
    """Have a sample run; the list holds its text at the end."""
    text: list[int] = []
    server.rounds()
    thread = threading.Thread(target=lambda: text.extend(server.engine.generate([sample(name)], LONG)[0].response))
    thread.start()
    while not server.rounds():
        time.sleep(0.01)
    yield text
    thread.join()


def tripled() -> dict[str, torch.Tensor]:
    return {name: tensor * 3 for name, tensor in WEIGHTS.items()}


def test_while_an_update_is_open_nothing_is_generated(server: Server) -> None:
    before = server.text()
    server.rounds()
    session = server.begin()
    half = dict(list(tripled().items())[::2])
    assert server.post(f"weights/bucket?session={session}", data=save(half)).json() == {}
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(server.post, "generate", data=body("b", 4))
        old = {name: WEIGHTS[name] for name in half}
        assert server.post(f"weights/bucket?session={session}", data=save(old)).json() == {}
        assert not waiting.done() and not server.rounds()
        assert server.post(f"weights/end?session={session}").json() == {}
        assert json.loads(waiting.result().text)["weight_versions"][0]["version"] == "5"
    assert server.text() == before


def test_another_clients_bucket_never_enters(server: Server) -> None:
    session = server.begin()
    for wrong in ("0" * 32, secrets.token_hex(16)):
        for path in ("bucket", "end", "abandon"):
            data = save({NORM: WEIGHTS[NORM]}) if path == "bucket" else b""
            told = server.told(f"weights/{path}?session={wrong}", 409, data=data)
            assert "belongs to another client" in told
    server.post(f"weights/abandon?session={session}")
    assert server.engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_group_sends_an_update(server: Server, alone: None) -> None:
    engine = SGLangEngine.of(server.process, timeout=60, transport=GroupBroadcast())
    before = server.text()
    engine.update_weights(30, tripled().items())
    assert engine.generate([sample("v")], LONG)[0].policy_versions[0][0] == 30
    engine.update_weights(32, WEIGHTS.items())
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    assert server.text() == before


def test_a_refused_bucket_ends_the_update_before_its_tensors_are_written(server: Server) -> None:
    server.engine.update_weights(33, WEIGHTS.items())
    with pytest.raises(EngineError, match="the engine's is"):
        server.engine.update_weights(34, (tripled() | {NORM: torch.zeros(3)}).items())
    assert server.engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    server.engine.update_weights(35, WEIGHTS.items())


def test_a_lost_owner_leaves_no_mixture_behind(server: Server) -> None:
    """The next update begins at once. It must send again what the lost one had sent."""
    before = server.text()
    lost = server.begin(version=8)
    assert server.post(f"weights/bucket?session={lost}", data=save({NORM: WEIGHTS[NORM] * 3})).json() == {}
    session = server.begin(version=9)
    assert "belongs to another client" in server.told(f"weights/bucket?session={lost}", 409, data=b"")
    other = "model.layers.0.input_layernorm.weight"
    server.post(f"weights/bucket?session={session}", data=save({other: WEIGHTS[other]}))
    assert f"were not sent, such as {NORM}" in server.told(f"weights/end?session={session}", 409)
    told = server.told("generate", 409, data=body("b", 4))
    assert "ended unfinished" in told and "so the weights are mixed" in told
    assert told == server.told("weights/begin?scope=target&version=9", 409)
    log = server.process.log.read_text()
    assert "update to version 8 ended unfinished: another one began, to version 9" in log
    server.engine.update_weights(9, WEIGHTS.items())
    assert server.text() == before


def test_an_update_that_sent_nothing_does_not_stop_samples(server: Server) -> None:
    alone = server.engine.generate([sample("alone")], LONG)[0].response.tolist()
    with running(server, "a") as text:
        session = server.begin(version=10)
        server.post(f"weights/abandon?session={session}")
    assert text == alone


def test_ids_are_the_clients_own(server: Server) -> None:
    """Clients use equal ids and prefixes of others'. One leaves, one aborts; the third has its whole text."""
    alone = server.engine.generate([sample("alone")], LONG)[0].response.tolist()
    with running(server, "job-10.") as text:
        for name in ("job-1", "job-10.", "j"):
            server.send("generate", body(name, 2000)).close()
        with ThreadPoolExecutor(1) as other:
            aborted = other.submit(server.post, "generate", data=body("job-1", 2000))
            while not aborted.done():
                server.engine.abort(["job-1", "j", "job-10"])
                time.sleep(0.01)
            assert json.loads(aborted.result().text)["finish"]["type"] == "abort"
    assert text == alone


def test_weights_of_nan_are_an_error_of_the_sample(server: Server) -> None:
    session = server.begin(version=12)
    server.post(f"weights/bucket?session={session}", data=save({NORM: WEIGHTS[NORM] * float("nan")}))
    server.post(f"weights/end?session={session}")
    for progress in (False, True):
        sent = json.loads(body("a", 4)) | {"progress": progress}
        line = json.loads(server.post("generate", json=sent).text, parse_constant=lambda text: pytest.fail(text))
        assert "the weights give a log-prob of nan" in line["error"] and line["id"] == "a"
    server.engine.update_weights(13, WEIGHTS.items())
    assert server.text()


# ---- malformed requests: a 4xx, one sentence in JSON, and the engine still serves its weights -----------------------


def asked(**changes: object) -> dict[str, object]:
    return {"requests": [{"id": "a", "input_ids": [11], "sampling": {"max_new_tokens": 4}} | changes]}


JOIN = {"address": "127.0.0.1", "port": 9, "size": 2, "group": "rlspec-a", "backend": "gloo"}
MALFORMED = [
    ("generate", b"\xff\xfe{}", "the body is not JSON"),
    ("generate", asked(sampling={"stop": ["a"]}), "sampling.stop needs a tokenizer"),
    ("control/set_config", {"config": 4}, "cannot run k4; it was launched with"),
    ("control/set_spec_rule", {"spec_rule": {}}, "no field 'roofline'"),
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


@pytest.mark.parametrize(("path", "body", "words"), MALFORMED, ids=[words.replace(" ", "-") for *_, words in MALFORMED])
def test_a_malformed_request_is_refused_in_one_sentence(server: Server, path: str, body: object, words: str) -> None:
    """tests/rollout/test_schemas.py has the same rules without an engine."""
    session = server.begin() if "SESSION" in path else ""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = server.told(path.replace("SESSION", session), 400, data=sent)
    if session:
        server.post(f"weights/abandon?session={session}")
    assert words in told and "\n" not in told and "Traceback" not in told and "pydantic" not in told


def test_nothing_of_that_changed_a_weight(server: Server) -> None:
    assert server.engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}


def test_routes_methods_keys_and_other_sites(server: Server) -> None:
    url = server.process.url
    refused = requests.post(f"{url}/rlspec/generate", timeout=30)
    assert refused.status_code == 401 and "Bearer KEY" in refused.text
    assert requests.get(f"{url}/server_info", timeout=30).status_code == 401
    told = requests.get(f"{url}/server_info", headers=server.headers, timeout=30).text
    assert server.process.api_key not in told
    page = requests.get(f"{url}/health", headers={"Origin": "http://other.example"}, timeout=30)
    assert not any("access-control" in name.lower() for name in page.headers)
