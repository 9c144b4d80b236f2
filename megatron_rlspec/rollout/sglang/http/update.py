"""The weight update of an engine: who may send, for how long, and whether the engine may generate. Imports no SGLang.

An update belongs to the client that began it: `begin` returns a token, and every other request of the update names it.
The update has one scope and one version. It ends complete by `end`, or unfinished: by `abandon`, or after a silence.
After an unfinished update the weights mix two versions. The engine generates nothing until a later update has sent the
same tensors again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_rlspec.rollout.sglang import limits
from megatron_rlspec.rollout.sglang.schemas import Refusal, plain
from megatron_rlspec.types import Scope


@dataclass
class Update:
    """An open update. `sent`: names of the tensors that schedulers were given; `seen`: when its owner last sent."""

    scope: Scope
    version: str
    seen: float
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    sent: set[str] = field(default_factory=set)
    failed: str = ""  # why a bucket was not loaded
    receiving: int = 0  # buckets whose bodies are being read


class Weights:
    """What is known of an engine's weights.

    update     the open update, if there is one
    asleep     whether the memory of the weights is released
    undefined  why the engine generates nothing; "" if it does
    paused     whether a client asked for a pause, beside those that updates need
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stale: set[str] = set()  # tensors that are undefined, or of unfinished updates
        self.update: Update | None = None
        self.asleep = False
        self.undefined = ""
        self.paused = False

    def check(self) -> None:
        """Raise Refusal unless the engine may generate."""
        self.check_closed()
        self.check_defined()

    def check_defined(self) -> None:
        """Raise Refusal while the engine sleeps, and while its weights are undefined."""
        self._check_awake()
        if self.undefined:
            raise Refusal(409, f"{self.undefined}; push all of them, with scope=all")

    def check_closed(self) -> None:
        """Raise Refusal while an update is open."""
        if self.update is not None:
            silent = self._clock() - self.update.seen
            raise Refusal(
                409,
                f"a weight update is open, to version {self.update.version}, silent for {silent:.0f} s; it ends with "
                f"weights/end, or after {limits.UPDATE_SILENT:.0f} s of silence",
            )

    def check_asleep(self, asleep: bool) -> None:
        """Raise Refusal unless the engine is `asleep`, or awake."""
        if self.asleep != asleep:
            raise Refusal(409, f"the engine is {'asleep already' if self.asleep else 'awake'}")

    def begin(self, scope: Scope, version: str) -> Update:
        """Open an update. Raises Refusal."""
        self._check_awake()
        self.check_closed()
        if scope != "all":
            self.check_defined()
        self.update = Update(scope, version, self._clock())
        return self.update

    def of(self, token: str) -> Update:
        """Return the open update of this token, whose owner has just sent something. Raises Refusal."""
        if self.update is None:
            raise Refusal(409, "no weight update is open; call weights/begin first")
        if not secrets.compare_digest(token, self.update.token):
            raise Refusal(
                409,
                "session is not that of the open weight update, which belongs to another client",
            )
        self.heard(self.update)
        return self.update

    def heard(self, update: Update) -> None:
        """Note that the owner has sent something."""
        update.seen = self._clock()

    @contextmanager
    def receiving(self, update: Update) -> Iterator[None]:
        """Count a bucket whose body is being read. Raises Refusal if there are too many."""
        if update.receiving >= limits.BUCKETS:
            raise Refusal(
                409,
                f"the update is sending {limits.BUCKETS} buckets already; expected one after the other",
            )
        update.receiving += 1
        try:
            yield
        finally:
            update.receiving -= 1

    def sending(self, update: Update, names: Collection[str]) -> None:
        """Note that schedulers are given these tensors."""
        update.sent.update(names)
        self._stale.update(names)

    def silence(self, update: Update) -> float:
        """Return the seconds that the update may stay silent from now on."""
        return update.seen + limits.UPDATE_SILENT - self._clock()

    def end(self, update: Update) -> None:
        """End an update that is complete, as its owner says. Raises Refusal if it is not; then it ended unfinished."""
        left = self._stale - update.sent
        if update.failed or left:
            why = (
                update.failed
                or f"{len(left)} tensors that are undefined were not sent, such as {_first(left)}"
            )
            self.abandon(update, why)
            raise Refusal(409, self.undefined)
        self.update = None
        self._stale.clear()
        if update.scope == "all":
            self.undefined = ""

    def abandon(self, update: Update, why: str) -> None:
        """End an update unfinished."""
        self.update = None
        if update.sent:
            self.undefined = (
                f"the update to version {update.version} ended unfinished ({why}), "
                "so the weights are mixed"
            )

    def sleep(self, names: Collection[str]) -> None:
        """Note that the tensors `names` lose their values; one update then has to send all of them."""
        self._stale.update(names)
        self.undefined = "the engine slept, so its weights are undefined"

    def _check_awake(self) -> None:
        if self.asleep:
            raise Refusal(409, "the engine sleeps: its memory is released; call wake first")


def _first(names: Collection[str]) -> str:
    return plain(min(names))
