"""End a run by a signal or the death of torchrun: at once before the first step, later with a checkpoint.

Before `defer`, a signal raises `Interrupted` in the main thread, like Ctrl-C in any Python program. After it, a signal
is only noted, because an exception in the middle of a collective call would leave the other ranks waiting. The run then
looks at `reason` between steps and between the rollouts of a step.

`commands/training.py` makes and installs the object; `run/session.py` calls `defer`. `rlspec answer` never does, so
there a signal always ends the command at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# A Ctrl-C later than this after the first request to end ends the process at once, without a checkpoint. An earlier one
# is a repeated delivery of the first Ctrl-C: the terminal and torchrun may both send it.
FORCE_SECONDS = 1.0
# Once torchrun is gone, a rank has this time to write its checkpoint and to end by itself. Then it is ended.
LAUNCHER_GONE_SECONDS = 120.0


class Interrupted(BaseException):
    """A signal ended the run before `defer`. It is no Exception, so that no `except Exception` swallows it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interruption:
    """Records why this process is to end: after `install`, because of a signal or of torchrun's death.

    reason         one line; "" until there is one
    exit_code      of the process, once there is a reason; 1 before
    end_requested  set once there is a reason, for threads that wait; set it by `request_end` only
    """

    def __init__(self, note: str = " before the first step") -> None:
        """Handle nothing yet; `install` does. `note` follows the reason in the message of Interrupted."""
        self.reason = ""
        self._note = note
        self.exit_code = 1
        self.end_requested = threading.Event()
        self._deferred = False  # whether `defer` was called
        self._since = 0.0  # time.monotonic() of the first request to end

    def install(self) -> Interruption:
        """Handle SIGINT, SIGTERM and SIGHUP from now on, and watch torchrun.

        Call it once a process, in the main thread.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            # Under nohup SIGHUP is ignored, and stays so.
            signal.signal(signal.SIGHUP, self._handle)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent
            threading.Thread(
                target=self._watch, args=(os.getppid(),), name="launcher", daemon=True
            ).start()
        return self

    def defer(self) -> None:
        """Record signals from now on instead of raising Interrupted. Raises Interrupted if a signal came before.

        Main thread only, because signals are handled there. A second call changes nothing. There is no way back.
        """
        self._raise_if_requested()
        self._deferred = True

    @contextmanager
    def errors_as_interrupted(self) -> Iterator[None]:
        """Turn an error inside the `with` block into Interrupted if the run was to end by then and is not deferred.

        C++ libraries raise errors of their own when a signal interrupts them.
        """
        try:
            yield
        except Exception:
            self._raise_if_requested()
            raise

    def request_end(self, reason: str, exit_code: int) -> None:
        """Record that the run is to end, and return. The first reason counts: a later call changes nothing.

        exit_code  that the process then ends with
        """
        if not self.end_requested.is_set():
            self.reason = reason
            self.exit_code = exit_code
            self._since = time.monotonic()
            self.end_requested.set()  # last: a thread that sees it set reads the other fields

    def _raise_if_requested(self) -> None:
        """Raise Interrupted if the run is to end and `defer` was not called. Main thread only."""
        if self.end_requested.is_set() and not self._deferred:
            raise Interrupted(f"{self.reason}{self._note}", self.exit_code) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Python calls it in the main thread. The exit code is a shell's, 128 + signal number."""
        again = self.end_requested.is_set() and time.monotonic() - self._since > FORCE_SECONDS
        if again and number == signal.SIGINT:
            os._exit(128 + number)
        self.request_end(f"interrupted by {signal.Signals(number).name}", 128 + number)
        self._raise_if_requested()

    def _watch(self, launcher: int) -> None:
        """Ask the run to end when torchrun has ended, and end this process; runs in a thread of its own.

        Without torchrun nothing else would end this rank after another one died.

        launcher  process id of torchrun
        """
        # A process whose parent ends gets another parent.
        while os.getppid() == launcher:
            time.sleep(0.5)
        self.request_end("torchrun ended", 1)
        # This thread cannot raise Interrupted in the main one, so it ends the process. Before `defer` there is no
        # checkpoint to wait for.
        if self._deferred:
            time.sleep(LAUNCHER_GONE_SECONDS)
        os._exit(1)
