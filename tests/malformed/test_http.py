"""Malformed HTTP requests to a real engine: a 4xx, one sentence in JSON, within seconds, and the engine still draws."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import requests
import tiny_mimo
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang import schemas
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import Prompt, Request, Sampling

VOCABULARY = 160
CONFIG = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=VOCABULARY)
WEIGHTS = tiny_mimo.weights(CONFIG)
SERVE = "--device cpu --dtype float32 --candidate-steps 0,1,2,3 --max-total-tokens 4096 --max-running-requests 16"
NORM, DRAFTER = "model.norm.weight", "model.mtp_layers.0.final_layernorm.weight"
PYTHON = ("Traceback", "pydantic", "Input should", "<class", "object at 0x", "errno", "NoneType")


class Server:
    """The engine under attack, and what proves that it still serves the weights that it started with."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.engine = SGLangEngine.of(process, timeout=60)
        self.headers = {"Authorization": f"Bearer {process.api_key}"}
        self.text = self.draw()
        self.marks = {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}

    def draw(self) -> list[int]:
        sampling = Sampling(max_new_tokens=6, ignore_eos=True)
        return self.engine.generate([Request("alive.", Prompt(0, np.arange(3, 9)), 7)], sampling)[0].response.tolist()

    def post(self, path: str, **options: object) -> requests.Response:
        headers = self.headers | options.pop("headers", {})
        return requests.post(f"{self.process.url}{path}", headers=headers, timeout=60, **options)

    def begin(self, scope: str = "all") -> str:
        """Open an update; return its token."""
        return self.post(f"/rlspec/weights/begin?scope={scope}&version=0").json()["session"]

    def end(self, session: str) -> None:
        assert self.post(f"/rlspec/weights/end?session={session}").status_code == 200
        assert self.post("/rlspec/resume").status_code == 200

    def abandon(self, session: str) -> None:
        self.post(f"/rlspec/weights/abandon?session={session}")

    def check_alive(self) -> None:
        assert self.draw() == self.text and not self.process.ended


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attacked")
    model = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    environment = {"OMP_NUM_THREADS": "1"}
    with launch(model, folder / "log", arguments=SERVE.split(), environment=environment) as process:
        process.wait()
        yield Server(process)


def refusal(answer: requests.Response) -> str:
    """The sentence of a refused request."""
    assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
    found = answer.json()
    assert set(found) == {"error"}, found
    told = found["error"]
    assert isinstance(told, str) and told and "\n" not in told and len(told) < 1200
    assert not any(word in told for word in PYTHON), told
    return told


@dataclass(frozen=True)
class Attack:
    """One malformed request: `body` is sent as it is if it is bytes, else as JSON; `session` opens that scope before.

    `words` must be in the sentence; `status` is that of the answer.
    """

    name: str
    path: str
    body: object = b""
    words: tuple[str, ...] = ()
    status: int = 400
    session: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def generating(name: str, words: str, **changes: object) -> Attack:
    request = {"id": "a", "input_ids": [11], "sampling": {"max_new_tokens": 4}} | changes
    return Attack(name, "generate", {"requests": [request]}, (words,))


def sampling(name: str, words: str, **changes: object) -> Attack:
    return generating(name, words, sampling={"max_new_tokens": 4} | changes)


def lacking(route: str, name: str) -> Attack:
    body = {key: value for key, value in NEEDED[route].items() if key != name}
    return Attack(f"{route}: no {name}", route, body, (f"{name} is missing",))


NOT_JSON = {
    "not UTF-8": b"\xff\xfe{}",
    "deep list": b"[" * 200_000,
    "lone surrogate": b'{"ids":["\\ud800"]}',
    "BOM": b"\xef\xbb\xbf{}",
}
BUCKET = {"names": [NORM], "dtypes": ["float32"], "shapes": [[64]]}
ROUTES = ("generate", "abort", "pause", "resume", "sleep", "wake", "weights/join?session=SESSION",
          "weights/receive?session=SESSION", "control/set_schedule", "control/describe")  # fmt: skip
NEEDED = {
    "weights/join?session=SESSION": {
        "address": "127.0.0.1",
        "port": 9,
        "size": 2,
        "group": "rlspec-a",
        "backend": "gloo",
    },
    "weights/receive?session=SESSION": {"group": "rlspec-a", "names": [NORM], "dtypes": ["float32"], "shapes": [[64]]},
}


ATTACKS = [Attack(f"generate: {name}", "generate", body) for name, body in NOT_JSON.items()]
ATTACKS += [Attack(f"{route}: list", route, b"[]", ("expected an object",)) for route in ROUTES]
ATTACKS += [
    Attack("generate: empty body", "generate", b"", ("requests is missing",)),
    Attack("generate: no requests", "generate", {"requests": []}, ("at least 1 item",)),
    Attack("generate: no id", "generate", {"requests": [{"input_ids": [1]}]}, ("requests[0].id is missing",)),
    generating("generate: id 5", "requests[0].id is 5; expected a valid string", id=5),
    generating("generate: id long", "at most 256 characters", id="x" * 100_000),
    generating("generate: id of control characters", "should match pattern", id="a\nb"),
    generating("generate: ids text", "expected a valid array", input_ids="11"),
    generating("generate: ids just outside", "input_ids[1] is 160", input_ids=[11, 160]),
    generating("generate: ids 2**70", "input_ids", input_ids=[2**70]),
    generating("generate: prompt too long", "context of 4096", input_ids=[11] * 5000),
    generating("generate: unknown field", "requests[0].text is not known", text="hello"),
    sampling("generate: unknown sampling key", "sampling.temprature is not known", temprature=1.0),
    sampling("generate: more tokens than the context", "context of 4096", max_new_tokens=5000),
    sampling("generate: temperature text", "expected a valid number", temperature="hot"),
    sampling("generate: top_p 0", "greater than 0", top_p=0),
    sampling("generate: top_k 0", "expected -1", top_k=0),
    sampling("generate: an empty stop string", "at least 1 character", stop=[""]),
    sampling("generate: a stop string without a tokenizer", "sampling.stop needs a tokenizer", stop=["a"]),
    sampling("generate: ignore_eos 1", "expected true or false", ignore_eos=1),
    Attack("generate: NaN", "generate", b'{"requests":[{"id":"a","input_ids":[1],"sampling":{"temperature":NaN}}]}'),
    Attack(
        "generate: an id twice",
        "generate",
        {"requests": [{"id": "a", "input_ids": [1]}, {"id": "a", "input_ids": [2]}]},
        ("given to two requests",),
    ),
    Attack("abort: ids 5", "abort", {"ids": 5}, ("ids is 5; expected a valid array",)),
    *(Attack(f"{name}: a body", name, {"mode": "a"}, ("mode is not known",)) for name in ("pause", "sleep", "wake")),
    Attack("wake: awake", "wake", b"", ("the engine is awake",), 409),
    Attack("sleep: during a push", "sleep", b"", ("a weight update is open",), 409, "all"),
    *(lacking(route, name) for route, body in NEEDED.items() for name in body),
    *(
        Attack(f"{route}: no key", route, b"", ("Bearer KEY",), 401, headers={"Authorization": ""})
        for route in ("sleep", "wake", *NEEDED)
    ),
    Attack("no such route", "nothing", b"", ("no route", "generate"), 404),
    Attack("control: no such command", "control/nothing", b"", ("no route", "control/set_schedule"), 404),
    Attack("control: path", "control/..%2f..", b"", (), 404),
    Attack("hold: no reason", "control/hold", {}, ("reason is missing",)),
    Attack("set_schedule: none", "control/set_schedule", {}, ("schedule is missing",)),
]


def schedule(name: str, words: str, **changes: object) -> Attack:
    data = {"batch_edges": [1], "context_edges": [0], "configs": [[[1, 1, 2]]]} | changes
    return Attack(f"set_schedule: {name}", "control/set_schedule", {"schedule": data}, (words,))


def rule(name: str, words: str, **data: object) -> Attack:
    return Attack(f"set_spec_rule: {name}", "control/set_spec_rule", {"spec_rule": data}, (words,))


ATTACKS += [
    schedule("edges fall", "strictly increasing", batch_edges=[8, 1], configs=[[[1, 1, 2]], [[1, 1, 2]]]),
    schedule("rows missing", "must have 1 rows", configs=[[[1, 1, 2]], [[1, 1, 2]]]),
    schedule("config that cannot be", "num_draft_tokens=9", configs=[[[3, 1, 9]]]),
    schedule("config that was not launched", "cannot run k4; it was launched with", configs=[[[4, 1, 5]]]),
    rule("empty", "expected exactly one of table, roofline, schedule"),
    rule("table not there", "No such file", table="/no/such/file.json"),
    rule("table deep", "set_spec_rule", table={"a": {"b": {"c": []}}}),
    rule("roofline of a list", "spec_rule.roofline.token_ms is [1]; expected a valid number",
         roofline={"weights_ms": 1, "token_ms": [1]}),
    rule("roofline of nothing", "weights_ms, token_ms and host_ms are 0: expected a round that takes time",
         roofline={"weights_ms": 0, "token_ms": 0, "context_ms": 0, "drafter": 0}),
    rule("acceptance empty", "spec_rule.acceptance.depth is missing", acceptance={}),
    rule("unknown field", "spec_rule.polcy is not known", polcy=1),
    rule("two deciders", "exactly one", schedule={"batch_edges": [1], "context_edges": [0], "configs": [[[1, 1, 2]]]},
         roofline=Roofline.of_layers(2).to_json()),
    Attack("begin: no scope", "weights/begin?version=1", b"", ("scope is missing",)),
    Attack("begin: no version", "weights/begin?scope=all", b"", ("version is missing",)),
    *(
        Attack(f"begin: version {text}", f"weights/begin?scope=all&version={text}", b"", ("version is",))
        for text in ("-1", "0" * 19)
    ),
    Attack("begin: scope draft", "weights/begin?scope=draft&version=1", b"", ("expected 'all', 'target'",)),
    Attack("begin: two scopes", "weights/begin?scope=all&scope=all&version=1", b"", ("more than once",)),
    Attack("begin: unknown query", "weights/begin?scope=all&version=1&x=1", b"", ("x is not known",)),
    Attack("begin: twice", "weights/begin?scope=all&version=1", b"", ("a weight update is open",), 409, "all"),
    Attack("end: no session", "weights/end", b"", ("session is missing",)),
    Attack("end: a text", "weights/end?session=x", b"", ("session is",)),
    Attack("end: no bucket", "weights/end?session=SESSION", b"", ("no bucket came",), 409, "all"),
    Attack("abandon: not open", "weights/abandon?session=SESSION", b"", ("no weight update is open",), 409),
    Attack("bucket: of another client", f"weights/bucket?session={'0' * 32}", b"", ("another client",), 409, "all"),
    Attack("end: of another client", f"weights/end?session={'0' * 32}", b"", ("another client",), 409, "all"),
    Attack("end: not open", "weights/end?session=SESSION", b"", ("no weight update is open",), 409),
    Attack("bucket: not open", "weights/bucket?session=SESSION", save({NORM: torch.ones(64)}), ("weights/begin",), 409),
    Attack("bucket: empty", "weights/bucket?session=SESSION", b"", ("header too small",), 400, "all"),
    Attack("bucket: text", "weights/bucket?session=SESSION", b"hello, engine", ("header too large",), 400, "all"),
    *(
        Attack(f"handle: {title}", "weights/handle?session=SESSION", BUCKET | {"handle": text}, (told,), 400, "all")
        for title, text, told in (
            ("on a CPU", "A" * 86 + "==", "this engine, on cpu, opens no memory of a GPU; push with push."),
            ("66 bytes", "A" * 88, "handle is"),
            ("a path", "../" * 30, "handle is"),
        )
    ),
    Attack("no key", "control/describe", b"", ("Bearer KEY",), 401, headers={"Authorization": ""}),
    Attack("key not ASCII", "control/describe", b"", ("Bearer",), 401, headers={"Authorization": "Bearer \xe9"}),
]  # fmt: skip


def bucket(name: str, words: str, tensors: dict[str, torch.Tensor], scope: str = "all") -> Attack:
    return Attack(f"bucket: {name}", "weights/bucket?session=SESSION", save(tensors), (words,), 400, scope)


def header(name: str, words: str, value: object, size: int = 256, pad: int = 8) -> Attack:
    text = json.dumps(value).encode()
    text += b" " * (-len(text) % pad)
    data = struct.pack("<Q", len(text)) + text + b"\0" * size
    return Attack(f"header: {name}", "weights/bucket?session=SESSION", data, (words,), 400, "all")


def entry(first: object, end: object, shape: object = (64,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def misaligned() -> dict[str, object]:
    """A header whose length leaves the tensor at an odd byte."""
    value = {NORM: entry(0, 256), "__metadata__": {"a": ""}}
    while (8 + len(json.dumps(value))) % 2 == 0:
        value["__metadata__"]["a"] += "x"
    return value


ATTACKS += [
    bucket("unknown name", "did you mean model.norm.weight?", {"model.norm.weigth": torch.ones(64)}),
    bucket("same bytes, another shape", "is [8, 8], but", {NORM: torch.ones(8, 8)}),
    bucket("the drafter's under target", "is the drafter's; scope is target", {DRAFTER: torch.ones(64)}, "target"),
    bucket("the target's under drafter", "is the target's; scope is drafter", {NORM: torch.ones(64)}, "drafter"),
    header("list", "invalid JSON in header", []),
    header("empty", "not fully covered", {}),
    header("metadata of numbers", "integer `1`, expected a string", {"__metadata__": {"a": 1}, NORM: entry(0, 256)}),
    header("offsets fractional", "expected usize", {NORM: entry(0.0, 256.0)}),
    header("offsets reversed", "offset for tensor", {NORM: entry(256, 0)}),
    header("offsets overlap", "invalid offset for tensor", {NORM: entry(0, 256), DRAFTER: entry(0, 256)}),
    header("offsets with a hole", "invalid offset for tensor", {NORM: entry(64, 320)}, size=320),
    header("offsets beyond the end", "not fully covered", {NORM: entry(0, 256)}, size=100),
    header("bytes left over", "not fully covered", {NORM: entry(0, 256)}, size=300),
    header("dtype unknown", "unknown variant `F8`", {NORM: entry(0, 256, dtype="F8")}),
    header("misaligned", "expected a multiple of 4", misaligned(), pad=1),
]


def test_names_are_unique():
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_one_sentence(server: Server, attack: Attack) -> None:
    session = server.begin(attack.session) if attack.session else "0" * 32
    try:
        body = attack.body if isinstance(attack.body, bytes) else json.dumps(attack.body).encode()
        path = attack.path.replace("SESSION", session)
        answer = server.post(f"/rlspec/{path}", data=body, headers=dict(attack.headers))
    finally:
        if attack.session:
            server.abandon(session)
    told = refusal(answer)
    assert answer.status_code == attack.status, told
    missing = [words for words in attack.words if words not in told]
    assert not missing, f"{missing} not in: {told}"
    assert not server.process.ended


def test_no_attack_changed_a_weight_or_the_text(server: Server) -> None:
    server.check_alive()
    assert server.engine.fingerprints() == server.marks


# ---- connections ----------------------------------------------------------------------------------------------------


def raw(server: Server, text: str, body: bytes = b"", seconds: float = 10.0) -> bytes:
    """What the server answers to these bytes, until it closes the connection or falls silent."""
    host, port = server.process.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), seconds) as connection:
        key = f"Authorization: Bearer {server.process.api_key}\nConnection: close\nHost: x\n"
        connection.sendall(text.replace("KEY\n", key).replace("\n", "\r\n").encode() + body)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except TimeoutError:
            pass
    return found


def test_bodies_of_strange_lengths(server: Server) -> None:
    chunked = "POST /rlspec/{} HTTP/1.1\nKEY\nTransfer-Encoding: chunked\n\n"
    assert b"200 OK" in raw(server, chunked.format("control/describe"), b"2\r\n{}\r\n0\r\n\r\n")
    assert b"400 Bad" in raw(server, chunked.format("generate"), b"2\r\n[]\r\n0\r\n\r\n")
    huge = "POST /rlspec/{} HTTP/1.1\nKEY\nContent-Length: 1000000000000000\n\n"
    for path in ("generate", "abort", "control/describe"):
        answer = raw(server, huge.format(path))
        assert b"413" in answer.split(b"\r\n")[0] and b"expected at most" in answer
    for length in ("x", "-1", "1e3"):
        line = raw(server, f"POST /rlspec/abort HTTP/1.1\nKEY\nContent-Length: {length}\n\n").split(b"\r\n")[0]
        assert b" 400 " in line, line
    session = server.begin()
    path = f"weights/bucket?session={session}"
    assert b"413" in raw(server, huge.format(path)).split(b"\r\n")[0]
    assert not raw(server, f"POST /rlspec/{path} HTTP/1.1\nKEY\nContent-Length: 500\n\n", b"x", 1.0)
    assert server.post(f"/rlspec/{path}", data=iter([save({NORM: WEIGHTS[NORM]})])).json() == {}
    server.end(session)
    server.check_alive()


@pytest.mark.slow
def test_a_silent_trainer_does_not_block(server: Server) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    body = NEEDED["weights/join?session=SESSION"]
    cases = [
        ({}, "cannot connect to the trainer at 127.0.0.1:9: Connection refused"),
        ({"port": silent.getsockname()[1]}, "does not answer as the trainer's store"),
        ({"address": "no.such.host.invalid"}, "cannot connect to the trainer"),
        ({"first": 2}, "size is 2; expected at least 3: this engine has ranks 2 to 2"),
        ({"size": 2**40}, "less than or equal to 4096"),
        ({"backend": "nccl"}, "expected gloo"),
        ({"backend": "mpi"}, "expected 'nccl' or 'gloo'"),
        ({"group": "other"}, "should match pattern"),
        ({"address": "a b"}, "should match pattern"),
    ]
    for change, told in cases:
        session = server.begin()
        assert told in refusal(server.post(f"/rlspec/weights/join?session={session}", json=body | change))
        server.abandon(session)
        server.check_alive()
    silent.close()
    what = NEEDED["weights/receive?session=SESSION"]
    session = server.begin()
    for change, told in [
        ({}, "was not joined"),
        ({"shapes": []}, "at least 1"),
        ({"shapes": [[64], [64]]}, "expected as many of each"),
        ({"shapes": [[3]]}, "but the engine's is [64]"),
        ({"names": ["x"]}, "no tensor x"),
        ({"dtypes": ["int8"]}, "expected 'float64'"),
    ]:
        assert told in refusal(server.post(f"/rlspec/weights/receive?session={session}", json=what | change))
    server.abandon(session)
    server.check_alive()


def test_other_methods_and_other_sites(server: Server) -> None:
    for method in ("get", "put", "delete", "patch", "options"):
        answer = requests.request(method, f"{server.process.url}/rlspec/pause", headers=server.headers, timeout=30)
        assert answer.status_code == 405 and "expected POST" in refusal(answer)
    page = requests.get(f"{server.process.url}/health", headers={"Origin": "http://other.example"}, timeout=30)
    assert not any("access-control" in name.lower() for name in page.headers)
    told = requests.get(f"{server.process.url}/server_info", headers=server.headers, timeout=30).text
    assert server.process.api_key not in told
    assert requests.get(f"{server.process.url}/server_info", timeout=30).status_code == 401
    server.check_alive()


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [999999], "sampling_params": {"max_new_tokens": 2}},
        {"input_ids": [11], "sampling_params": {"max_new_tokens": 2.5}},
        {"input_ids": [11], "sampling_params": {"temperature": "x"}},
        {"rid": 5, "input_ids": [11]},
    ],
    ids=str,
)
def test_sglangs_own_route_does_not_end_the_engine(server: Server, body: dict) -> None:
    answer = server.post("/generate", json=body)
    assert 400 <= answer.status_code < 500, answer.text
    server.check_alive()


# ---- hypothesis -----------------------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TOKENS = st.lists(st.integers(-2, VOCABULARY + 1), max_size=6)
SAMPLINGS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 3) | JUNK},
    optional={
        "temperature": st.floats(0, 2) | JUNK,
        "top_p": st.floats(0, 1) | JUNK,
        "top_k": st.integers(-2, 5) | JUNK,
        "min_p": st.floats(0, 1) | JUNK,
        "stop": st.lists(st.text(max_size=3), max_size=2) | JUNK,
        "stop_token_ids": TOKENS | JUNK,
        "ignore_eos": st.booleans() | JUNK,
        "sampling_seed": st.integers(-1, 2**64) | JUNK,
        "n": JUNK,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"id": st.text(max_size=5) | JUNK, "input_ids": TOKENS | JUNK}, optional={"sampling": SAMPLINGS | JUNK}
)
EDGES = st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True).map(sorted)
CONFIGS = st.lists(
    st.lists(st.sampled_from([[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 1, 3], [9, 1, 10]]) | JUNK, max_size=2)
)
SCHEDULES = st.fixed_dictionaries(
    {"batch_edges": EDGES | JUNK, "context_edges": EDGES | JUNK, "configs": CONFIGS | JUNK}
)
RULES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(schemas.SpecRuleBody.model_fields, JUNK) | {"schedule": SCHEDULES, "roofline": JUNK},
)
BODIES: dict[str, st.SearchStrategy] = {
    "generate": st.fixed_dictionaries({"requests": st.lists(REQUESTS, max_size=3)}) | JUNK,
    "abort": st.fixed_dictionaries({"ids": JUNK}) | JUNK,
    "control/set_schedule": st.fixed_dictionaries({"schedule": SCHEDULES | JUNK}) | JUNK,
    "control/set_spec_rule": st.fixed_dictionaries({"spec_rule": RULES | JUNK}) | JUNK,
    "control/hold": JUNK,
    "control/stats": JUNK,
    "control/describe": JUNK,
    "sleep": st.lists(JUNK, min_size=1),
    "wake": JUNK,
    f"weights/join?session={'0' * 32}": st.fixed_dictionaries({"address": st.just("127.0.0.1"), "port": JUNK}) | JUNK,
    f"weights/receive?session={'0' * 32}": JUNK,
    "weights/begin": JUNK,
    "weights/end": JUNK,
    f"weights/bucket?session={'0' * 32}": JUNK,
    "nothing": JUNK,
}
SENT = st.one_of([st.tuples(st.just(path), bodies) for path, bodies in BODIES.items()])
fuzz: Callable = settings(
    database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def attack_once(server: Server, path: str, body: object) -> None:
    try:
        sent = json.dumps(body).encode()
    except (ValueError, UnicodeEncodeError):
        return
    answer = server.post(f"/rlspec/{path}", data=sent)
    if answer.status_code != 200:
        refusal(answer)
    elif path == "generate":
        lines = [json.loads(line) for line in answer.iter_lines()]
        assert len(lines) == len(body["requests"])
        assert all("error" not in line for line in lines), lines


@settings(fuzz, max_examples=20)
@given(SENT)
def test_any_request_is_answered(server: Server, sent: tuple[str, object]) -> None:
    attack_once(server, *sent)
    server.check_alive()


@pytest.mark.slow
@settings(fuzz, max_examples=500, derandomize=False)
@given(SENT)
def test_five_hundred_requests_are_answered(server: Server, sent: tuple[str, object]) -> None:
    attack_once(server, *sent)
    server.check_alive()
