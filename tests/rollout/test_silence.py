"""An engine that accepts a rollout, sends what it likes, and then nothing: what the client makes of it."""

import socketserver
import threading

import numpy as np
import pytest

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Prompt, Request, Sampling

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "stays", "told"),
    [
        (b"", True, "generate failed: silent for 1 s"),
        (HEAD, True, "generate broke off: silent for 1 s"),
        (HEAD, False, "generate broke off: the answer ended early"),
        (b"", False, "generate failed: the engine closed the connection without an answer"),
    ],
)
def test_a_silent_engine_is_distinguished_from_one_that_is_gone(said, stays, told):
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(said)
            if stays:
                ended.wait(20)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = SGLangEngine(f"http://127.0.0.1:{server.server_address[1]}", timeout=1.0)
        try:
            with pytest.raises(EngineError, match=told):
                engine.generate([Request("r.", Prompt(0, np.array([1, 2])), 0)], Sampling())
        finally:
            ended.set()
            server.shutdown()
