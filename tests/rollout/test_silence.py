"""Addresses without an engine, and engines that stop answering: each gets one line with the address."""

import socketserver
import threading

import numpy as np
import pytest

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import ServedEngines
from megatron_rlspec.types import Prompt, Request, Sampling

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "stays", "told"),
    [
        (b"", True, "generate failed: silent for 1 s"),
        (HEAD, False, "generate broke off: the answer ended early"),
        (b"", False, "generate failed: the answer ended early"),
    ],
)
def test_a_silent_engine_is_distinguished_from_one_that_has_ended(said, stays, told):
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(said)
            if stays:
                ended.wait(60)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        limit = float(told.split()[-2]) if stays else 60.0
        engine = SGLangEngine(f"http://127.0.0.1:{server.server_address[1]}", timeout=limit)
        try:
            with pytest.raises(EngineError, match=told):
                engine.generate([Request("r.", Prompt(0, np.array([1, 2])), 0)], Sampling())
        finally:
            ended.set()
            server.shutdown()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"[" * 100_000, "200 OK", "not an rlspec engine: control/describe answered '[[["),
        (b'{"detail": 1}', "200 OK", "not an rlspec engine: control/describe answered '{\"detail\": 1}'"),
        (b'{"detail": 1}', "404 Not Found", "not an rlspec engine: control/describe answered with status 404"),
    ],
    ids=["nested", "another", "404"],
)
def test_a_page_that_is_no_engine_is_refused(body, status, told, tmp_path):
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.wfile.write(head.encode() + body)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            engine = SGLangEngine(url)
            _told(engine.describe, told)
            asked = [Request("r.", Prompt(0, np.array([1])), 0)]
            for act in (
                lambda: engine.begin_update(1),
                lambda: engine.generate(asked, Sampling()),
                engine.progress,
                engine.stats,
                engine.recent_rounds,
                engine.spec_rule_report,
                engine.fingerprints,
            ):
                _told(act, "not an rlspec engine")
                engine._broken = ""
            # A run that is given this address stops before it builds a trainer or writes anything.
            _told(lambda: ServedEngines(load(None, {"rollout.urls": url}), tmp_path, GpuLayout()), told)
        finally:
            server.shutdown()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid:30000", "127.0.0.1:30000"])
def test_a_typing_error_in_an_address_is_refused(url):
    expected = f"{url}: control/describe failed: cannot connect; expected http://HOST:PORT of a running engine"
    _told(lambda: SGLangEngine(url).describe(), expected)


def test_a_key_that_no_header_may_have_is_named():
    _told(lambda: SGLangEngine("http://127.0.0.1:9", api_key="a\nb").describe(), "RLSPEC_API_KEY has a character")


def _told(act, words):
    with pytest.raises((EngineError, ConfigError)) as error:
        act()
    line = str(error.value)
    assert words in line and "\n" not in line and len(line) < 300, line
