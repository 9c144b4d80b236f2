"""End an engine when the process that launched it ends, however that comes about."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import psutil


def end_with(parent: int) -> None:
    """From now on, kill this process and all that it started once its parent is no longer the process `parent`."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
