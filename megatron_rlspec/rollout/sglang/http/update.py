"""The weight update of an engine: who may send, and whether the engine may generate. Imports no SGLang.

SGLang's own sessions do not hold two promises. An update belongs to the client that began it: `begin` returns a token,
and every other request of the update names it. And after an update that did not reach `end` the weights mix two
versions: the engine generates nothing until a later update has sent the same tensors again.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_rlspec.rollout.sglang.schemas import Refusal, plain
from megatron_rlspec.types import Scope


@dataclass
class Update:
    """An open update.

    sent    names of the tensors that schedulers were given
    failed  why a bucket was not loaded
    """

    scope: Scope
    version: str
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    sent: set[str] = field(default_factory=set)
    failed: str = ""


class Weights:
    """What is known of an engine's weights.

    update     the open update, if there is one
    undefined  why the engine generates nothing; "" if it does
    """

    def __init__(self) -> None:
        self.update: Update | None = None
        self.undefined = ""
        self._mixed: set[str] = set()  # names of tensors that unfinished updates sent

    def check_defined(self) -> None:
        """Raise Refusal while the weights are a mixture of versions."""
        if self.undefined:
            raise Refusal(409, f"{self.undefined}; push all of them, with scope=all")

    def begin(self, scope: Scope, version: str) -> Update:
        """Open an update. Raises Refusal for a part of weights that are a mixture."""
        if scope != "all":
            self.check_defined()
        self.update = Update(scope, version)
        return self.update

    def update_of(self, token: str) -> Update:
        """Return the open update of this token. Raises Refusal."""
        if self.update is None:
            raise Refusal(409, "no weight update is open; call weights/begin first")
        if not secrets.compare_digest(token, self.update.token):
            raise Refusal(
                409,
                f"session is not that of the open weight update, to version {self.update.version}, "
                "which belongs to another client",
            )
        return self.update

    def mark_sent(self, update: Update, names: Collection[str]) -> None:
        """Note that schedulers are given these tensors."""
        update.sent.update(names)
        self._mixed.update(names)

    def end(self, update: Update) -> None:
        """End an update that is complete, as its owner says. Raises Refusal if it is not; then it ended unfinished."""
        missing = self._mixed - update.sent
        reason = update.failed
        if missing and not reason:
            reason = (
                f"{len(missing)} tensors of unfinished updates were not sent, "
                f"such as {plain(min(missing))}"
            )
        if reason:
            self.abandon(update, reason)
            raise Refusal(409, self.undefined or reason)
        self.update = None
        self._mixed.clear()
        self.undefined = ""

    def abandon(self, update: Update, why: str) -> None:
        """End an update unfinished."""
        self.update = None
        if update.sent:
            self.undefined = (
                f"the update to version {update.version} ended unfinished ({why}), "
                "so the weights are mixed"
            )
