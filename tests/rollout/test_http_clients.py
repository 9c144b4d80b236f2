"""Clients of one real engine who disturb each other: by updates, ids, reservations, bodies that do not come, and all.

The engine's limits in time are short (`short_limits_serve.py`). What a client is told is always one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import requests
import tiny_mimo
import torch
import torch.distributed as dist
from safetensors.torch import save

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Http, Transport
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

    def free(self) -> int:
        """Return the room of the KV cache that no running sample has, in tokens."""
        return self.engine.progress().free_tokens


def sample(name: str, tokens: int = 6) -> Request:
    return Request(name, Prompt(0, np.arange(3, 3 + tokens)), 7)


def body(name: str, tokens: int) -> bytes:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 7}
    return json.dumps({"requests": [{"id": name, "input_ids": [3, 4, 5], "sampling": sampling}]}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    model = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    script = Path(__file__).with_name("short_limits_serve.py")
    port, key = free_port(ENGINES), secrets.token_urlsafe(8)
    command = [sys.executable, str(script), "--model", str(model), "--port", str(port), *SERVE.split()]
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1", "RLSPEC_API_KEY": key}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    running = EngineProcess(process, f"http://127.0.0.1:{port}", folder / "log", Path(tempfile.mkdtemp()), key)
    with running:
        yield Server(running.wait(180))


@contextmanager
def running(server: Server, name: str) -> Iterator[list[int]]:
    """Have a sample run; the list holds its text at the end."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(server.engine.generate([sample(name)], LONG)[0].response))
    thread.start()
    while name not in [held.id for held in server.engine.progress().running]:
        time.sleep(0.01)
    yield found
    thread.join()


def tripled() -> dict[str, torch.Tensor]:
    return {name: tensor * 3 for name, tensor in WEIGHTS.items()}


def test_while_an_update_is_open_nothing_is_generated(server: Server) -> None:
    before = server.text()
    session = server.begin()
    half = dict(list(tripled().items())[::2])
    assert server.post(f"weights/bucket?session={session}", data=save(half)).json() == {}
    assert "a weight update is open, to version 5" in server.told("generate", 409, data=body("b", 4))
    assert "a weight update is open" in server.told("resume", 409)
    for path in ("continue_generation", "update_weights_from_tensor", "end_weight_update"):  # SGLang's own
        assert "a weight update is open" in server.told(f"../{path}", 409, json={})
    old = {name: WEIGHTS[name] for name in half}
    assert server.post(f"weights/bucket?session={session}", data=save(old)).json() == {}
    assert server.post(f"weights/end?session={session}").json() == {}
    server.post("resume")
    assert server.text() == before
    assert server.engine.generate([sample("c")], LONG)[0].policy_versions[0][0] == 5


def test_an_update_ends_stale_prefixes(server: Server) -> None:
    """The same prompt before and after: its cached prefix is of the old weights."""
    before = server.text()
    server.engine.update_weights(6, tripled().items())
    cached = server.text()
    fresh = server.text(name="other")
    assert cached == fresh
    server.engine.update_weights(7, WEIGHTS.items())
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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", [Http, GroupBroadcast])
def test_every_transport_sends_an_update_of_its_own(server: Server, way: type[Transport]) -> None:
    engine = SGLangEngine.of(server.process, timeout=60, transport=way())
    before = server.text()
    engine.update_weights(30, tripled().items())
    assert engine.progress().version == 30 and server.text() != before
    with pytest.raises(EngineError, match="the engine's is"):  # the second of its buckets
        engine.update_weights(31, [*WEIGHTS.items(), (NORM, torch.zeros(3))])
    engine.update_weights(32, WEIGHTS.items())
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    assert engine.progress().version == 32 and server.text() == before


def test_a_vanished_owner_leaves_no_mixture_behind(server: Server) -> None:
    before = server.text()
    session = server.begin(version=8)
    part = {NORM: WEIGHTS[NORM] * 3}
    assert server.post(f"weights/bucket?session={session}", data=save(part)).json() == {}
    while "is open" in (told := server.told("resume", 409)):  # the update ends by itself
        time.sleep(0.1)
    assert "the update to version 8 ended unfinished" in told and "so the weights are mixed" in told
    assert told in (
        server.told("generate", 409, data=body("b", 4)),
        server.told("weights/begin?scope=target&version=9", 409),
    )
    assert "update to version 8 ended unfinished" in server.process.log.read_text()
    session = server.begin(version=9)
    other = "model.layers.0.input_layernorm.weight"
    server.post(f"weights/bucket?session={session}", data=save({other: WEIGHTS[other]}))
    assert f"were not sent, such as {NORM}" in server.told(f"weights/end?session={session}", 409)
    server.engine.update_weights(9, WEIGHTS.items())
    assert server.text() == before


def test_a_client_that_leaves_a_silent_update_does_not_stop_samples(server: Server) -> None:
    """Nothing was sent, so the running sample goes on by itself, with the text that it has alone."""
    alone = server.engine.generate([sample("alone")], LONG)[0].response.tolist()
    with running(server, "a") as found:
        server.begin(version=10)
    assert found == alone


def test_an_update_ends_with_its_owners_connection(server: Server) -> None:
    """Its owner's process ended. The next one waits for what it left, and sends all."""
    before = server.text()
    first, second = (SGLangEngine.of(server.process, timeout=60) for _ in range(2))
    first._begin(20, "all")
    first._in_update("weights/bucket", data=save({NORM: WEIGHTS[NORM] * 3}))
    assert "a weight update is open" in server.told("weights/begin?scope=all&version=21", 409)
    assert first._owner is not None
    first._owner.close()
    second.update_weights(21, WEIGHTS.items())
    assert "to version 20 ended unfinished: its client closed the connection" in server.process.log.read_text()
    assert server.text() == before and server.engine.progress().version == 21


def test_an_unfinished_bucket_holds_nothing(server: Server) -> None:
    session = server.begin()
    with server.send(f"weights/bucket?session={session}", b"x" * 100, announced=10_000) as silent:
        assert server.post(f"weights/bucket?session={session}", data=save({NORM: WEIGHTS[NORM]})).json() == {}
        assert server.post(f"weights/end?session={session}").json() == {}
        assert silent.recv(65536).startswith(b"HTTP/1.1 408")
    server.post("resume")
    assert server.text()


@pytest.mark.parametrize("path", ["generate", "abort", "control/describe"])
def test_a_body_that_does_not_come_is_given_up(server: Server, path: str) -> None:
    with server.send(path, b"{", announced=1000) as connection:
        told = b""
        while part := connection.recv(65536):
            told += part
        assert told.startswith(b"HTTP/1.1 408") and b"the body is silent for 1 s, after 1 bytes" in told


def test_ids_are_the_clients_own(server: Server) -> None:
    """Clients use equal ids and prefixes of others'. One leaves, one aborts; the third has its whole text."""
    alone = server.engine.generate([sample("alone")], LONG)[0].response.tolist()
    with running(server, "job-10.") as found:
        for name in ("job-1", "job-10.", "j"):
            server.send("generate", body(name, 2000)).close()
        with ThreadPoolExecutor(1) as other:
            aborted = other.submit(server.post, "generate", data=body("job-1", 2000))
            while "job-1" not in [held.id for held in server.engine.progress().running]:
                time.sleep(0.01)
            server.engine.abort(["job-1", "j", "job-10"])
            assert json.loads(aborted.result().text)["finish"]["type"] == "abort"
    assert found == alone
    while server.engine.progress().running:  # those whose clients left
        time.sleep(0.05)


def test_weights_of_nan_are_an_error_of_the_sample(server: Server) -> None:
    session = server.begin(version=12)
    server.post(f"weights/bucket?session={session}", data=save({NORM: WEIGHTS[NORM] * float("nan")}))
    server.post(f"weights/end?session={session}")
    server.post("resume")
    for progress in (False, True):
        sent = json.loads(body("a", 4)) | {"progress": progress}
        line = json.loads(server.post("generate", json=sent).text, parse_constant=lambda text: pytest.fail(text))
        assert "the weights give a log-prob of nan" in line["error"] and line["id"] == "a"
    server.engine.update_weights(13, WEIGHTS.items())
    assert server.text()


def test_a_large_body_does_not_silence_the_server(server: Server) -> None:
    """Others are answered between two rows. A row is bounded, and so are all of them."""
    row = {"id": "a", "input_ids": [11] * 5000, "sampling": {"max_new_tokens": 4}}
    many = json.dumps({"requests": [row | {"id": f"a{i}"} for i in range(600)]}).encode()
    assert len(many) > 9e6 and "context" in server.told("generate", 400, data=many)
    wide = json.dumps({"requests": [row | {"input_ids": [11] * 3_000_000}]}).encode()
    assert "requests[0] has" in server.told("generate", 413, data=wide)
    assert "at most 4096 items" in server.told(
        "generate", 400, json={"requests": [row | {"input_ids": [1] * 9}] * 9000}
    )
    broken = many[:-1] + b",}"
    assert "not a JSON object" in server.told("generate", 400, data=broken)
    wrong = many.replace(b'"a599"', b"5")
    assert "requests[599].id is 5; expected a valid string" in server.told("generate", 400, data=wrong)


# ---- all of them at once --------------------------------------------------------------------------------------------


def hostile(server: Server, seed: int) -> None:
    """One client that does something wrong, and leaves."""
    chance = random.Random(seed)
    token = secrets.token_hex(16)
    prompt = {"id": chance.choice(["run-1", "run-", "x"]), "input_ids": [3, 4], "sampling": {"max_new_tokens": 200}}
    paths = {
        "leaves": lambda: server.send("generate", json.dumps({"requests": [prompt]}).encode()).close(),
        "unfinished": lambda: server.send(chance.choice(["generate", "abort"]), b"{", announced=10**6).recv(1),
        "bucket": lambda: server.post(f"weights/bucket?session={token}", data=os.urandom(1000)),
        "end": lambda: server.post(f"weights/{chance.choice(['end', 'abandon'])}?session={token}"),
        "abort": lambda: server.post("abort", json={"ids": ["run-", "x", "rlspec."]}),
        "junk": lambda: server.post("generate", data=os.urandom(chance.choice([10, 10**5]))),
        "rows": lambda: server.post("generate", json={"requests": [prompt] * 5000}),
        "key": lambda: requests.post(f"{server.process.url}/rlspec/abort", data=b"{}", timeout=60),
        "garbage": lambda: server.connect().sendall(os.urandom(500)),
        "rule": lambda: server.post("control/set_spec_rule", json={"spec_rule": {"roofline": {"a": []}}}),
    }
    with suppress(OSError):  # a connection that the server closed: requests' errors are OSErrors, too
        paths[chance.choice(list(paths))]()


@pytest.mark.parametrize("clients", [30, 1000])
def test_a_run_goes_on_beside_hostile_clients(server: Server, clients: int) -> None:
    asked = [Request(f"run-{i}", Prompt(i, np.arange(3, 9 + i)), 100 + i) for i in range(4)]
    sampling = Sampling(max_new_tokens=150, ignore_eos=True)
    alone = [s.response.tolist() for s in server.engine.generate(asked, sampling)]
    total = server.free()
    done = threading.Event()
    texts: list[list[list[int]]] = []

    def run() -> None:
        while not done.is_set() or not texts:
            texts.append([s.response.tolist() for s in server.engine.generate(asked, sampling)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ThreadPoolExecutor(30) as threads:
            list(threads.map(lambda seed: hostile(server, seed), range(clients)))
    finally:
        done.set()
        thread.join()
    assert texts and all(text == alone for text in texts)
    while server.free() < total or server.engine.progress().running:  # what the others left
        time.sleep(0.1)
    log = server.process.log.read_text()
    assert "Traceback" not in log, log[-3000:]
    print(f"{clients} clients beside {len(texts)} rollouts of {len(asked)} samples")
