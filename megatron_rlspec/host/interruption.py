"""End a run by a signal or the death of torchrun: at once before the first step, later with a checkpoint.

Before `defer`, a signal raises `Interrupted` in the main thread, like Ctrl-C in any Python program. After it, a signal
is only noted, because an exception in the middle of a collective call would leave the other ranks waiting. The run then
looks at `reason` between steps and between the rollouts of a step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# A second Ctrl-C later than this after the first one ends the process at once, without a checkpoint. An earlier one is
# an echo of the first.
FORCE_SECONDS = 1.0
# Once torchrun is gone, a rank has this time to write its checkpoint and to end by itself. Then it is ended.
LAUNCHER_GONE_SECONDS = 120.0


class Interrupted(BaseException):
    """A signal ended the run before its first step. It is no Exception, so that no handler swallows it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interruption:
    """Records why this process is to end: after `install`, because of a signal or of torchrun's death.

    reason     one line; "" until there is one
    exit_code  of the process, once there is a reason
    asked      set once there is a reason, for threads that wait
    """

    def __init__(self, note: str = " before the first step") -> None:
        """`note` follows the reason in the message of Interrupted."""
        self.reason = ""
        self._note = note
        self.exit_code = 1
        self.asked = threading.Event()
        self._deferred = False
        self._since = 0.0

    def install(self) -> Interruption:
        """Handle SIGINT, SIGTERM and SIGHUP from now on, and watch torchrun. For the main thread of a program."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else nohup started this process
            signal.signal(signal.SIGHUP, self._handle)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent
            threading.Thread(
                target=self._watch, args=(os.getppid(),), name="launcher", daemon=True
            ).start()
        return self

    def defer(self) -> None:
        """Record signals from now on instead of raising Interrupted. Raises Interrupted if a signal came before."""
        self._raise_if_asked()
        self._deferred = True

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Turn any error inside into Interrupted if a signal caused it: C++ libraries raise errors of their own."""
        try:
            yield
        except Exception:
            self._raise_if_asked()
            raise

    def ask(self, reason: str, exit_code: int) -> None:
        """Record that the run is to end. The first reason counts."""
        if not self.asked.is_set():
            self.reason = reason
            self.exit_code = exit_code
            self._since = time.monotonic()
            self.asked.set()

    def _raise_if_asked(self) -> None:
        if self.asked.is_set() and not self._deferred:
            raise Interrupted(f"{self.reason}{self._note}", self.exit_code) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.asked.is_set() and time.monotonic() - self._since > FORCE_SECONDS
        if again and number == signal.SIGINT:
            os._exit(128 + number)
        self.ask(f"interrupted by {signal.Signals(number).name}", 128 + number)
        self._raise_if_asked()

    def _watch(self, launcher: int) -> None:
        """Ask the run to end when torchrun has ended. Without it nothing would end this rank after another one died."""
        while os.getppid() == launcher:
            time.sleep(0.5)
        self.ask("torchrun ended", 1)
        # This thread cannot raise Interrupted in the main one. Before `defer` there is no checkpoint to wait for.
        if self._deferred:
            time.sleep(LAUNCHER_GONE_SECONDS)
        os._exit(1)
