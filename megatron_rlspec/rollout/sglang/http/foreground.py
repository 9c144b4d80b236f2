"""`rlspec serve` at a terminal: what is loaded, our own lines, and everything once the engine is ready.

SGLang and the packages that it imports print several dozen lines while an engine starts. These go to a log file only.
The engine is a process of its own; this one shows its output and passes signals on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from megatron_rlspec.rollout.sglang.http import checks, serve

OWN = b"rlspec serve: "
READY = OWN + b"ready on "
_POLL = 0.1  # seconds between two looks at the log


def main(argv: Sequence[str]) -> int:
    """Serve until the engine ends, and return its exit code. Raises ServeError.

    With `--stop-with-parent` the program that started this process reads the output itself, and gets all of it.
    `--print` starts no engine.
    """
    options, _ = serve.parsed(argv)
    if options.stop_with_parent or options.print:
        serve.main(list(argv))
        return 0
    checks.check(options)
    checks.installed_sglang()
    descriptor, log = tempfile.mkstemp(prefix=f"rlspec-serve-{options.port}-", suffix=".log")
    with open(descriptor, "wb") as output:
        engine = subprocess.Popen(
            [sys.executable, "-m", serve.__name__, *argv, f"--stop-with-parent={os.getpid()}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            # a terminal's Ctrl-C reaches this process only, which passes it on once
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: engine.send_signal(received))
    print(f"rlspec serve: starting; log: {log}", flush=True)
    ready = False
    last = b""
    with open(log, "rb") as written:
        for line in _lines(written, engine):
            if ready or line.startswith(OWN):
                ready = ready or line.startswith(READY)
                print(
                    line.decode(errors="replace"),
                    end="",
                    flush=True,
                    file=sys.stdout if ready else sys.stderr,
                )
            last = line.strip() or last
    code = engine.wait()
    if not ready and not last.startswith(OWN):
        print(
            f"rlspec serve: the engine ended: {last.decode(errors='replace')} (log: {log})",
            file=sys.stderr,
        )
    elif not ready and code == 2:
        Path(log).unlink()  # a mistake in the options: the line above says it
    return code if code >= 0 else 128 - code


def _lines(written: BinaryIO, engine: subprocess.Popen) -> Iterator[bytes]:
    """Yield the lines of a file that `engine` is writing, until it has ended."""
    rest = b""
    while True:
        ended = engine.poll() is not None
        rest += written.read()
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line + b"\n"
        if ended:
            if rest:
                yield rest + b"\n"
            return
        time.sleep(_POLL)
