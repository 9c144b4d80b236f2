"""The weight update of an engine: who may send, and whether the engine may generate. Imports no SGLang.

Two rules hold here that SGLang's own sessions do not have. An update belongs to the client that began it: `begin` makes
a token, and every other request of the update names it. After an update that did not reach `end` the weights mix two
versions, so the engine generates nothing until a later update of all weights has sent the same tensors again.

`weight_routes.py` has the only `WeightsState` of an engine, and changes it under its lock only.
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

    scope    which tensors it may have: "all", "target" or "drafter"
    version  decimal digits (`schemas.Version`)
    token    32 hexadecimal digits (`schemas.SessionQuery`)
    sent     names of the tensors that schedulers were given, whether or not they loaded them
    failed   why a bucket was not loaded, or why the update cannot end; "" so far
    """

    scope: Scope
    version: str
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    sent: set[str] = field(default_factory=set)
    failed: str = ""


class WeightsState:
    """Whether an engine's weights are one version.

    The order of an update is `begin`, `mark_sent` for each bucket, then `end` or `abandon`. `mark_sent`, `end` and
    `abandon` take the open update, as `update_of` returned it. They do not check it.

    update     the open update; None if there is none
    why_mixed  why nothing may be generated: an unfinished update left a mixture of versions; "" if none did
    """

    def __init__(self) -> None:
        self.update: Update | None = None
        self.why_mixed = ""
        # Names of all tensors sent since the last update that ended well. An update must have sent all of them to end
        # well: what an unfinished one wrote is of another version.
        self._unsettled: set[str] = set()

    def check_not_mixed(self) -> None:
        """Raise Refusal while the weights are a mixture of versions.

        It does not see an open update: `weight_routes.wait_until_may_generate` waits for its end first.
        """
        if self.why_mixed:
            raise Refusal(409, f"{self.why_mixed}; push all of them, with scope=all")

    def begin(self, scope: Scope, version: str) -> Update:
        """Open an update. Raises Refusal for a part of the weights (`scope`) while they are a mixture.

        An open update must be abandoned first: this one replaces it, and the mixture that it left would go unnoticed.
        """
        if scope != "all":
            self.check_not_mixed()
        self.update = Update(scope, version)
        return self.update

    def update_of(self, token: str) -> Update:
        """Return the open update. Raises Refusal without one, or if `token` is not its token."""
        if self.update is None:
            raise Refusal(409, "no weight update is open; call weights/begin first")
        # In constant time, as for a password.
        if not secrets.compare_digest(token, self.update.token):
            raise Refusal(
                409,
                f"session is not that of the open weight update, to version {self.update.version}, "
                "which belongs to another client",
            )
        return self.update

    def mark_sent(self, update: Update, names: Collection[str]) -> None:
        """Note that schedulers are given these tensors. Call it before they load them."""
        update.sent.update(names)
        self._unsettled.update(names)

    def end(self, update: Update) -> None:
        """End an update that its client says is complete. Raises Refusal if it is not, and ends it unfinished."""
        missing = self._unsettled - update.sent
        reason = update.failed
        if missing and not reason:
            reason = (
                f"{len(missing)} tensors of unfinished updates were not sent, "
                f"such as {plain(min(missing))}"
            )
        if reason:
            self.abandon(update, reason)
            # Without a mixture, because nothing was sent, `why_mixed` is "".
            raise Refusal(409, self.why_mixed or reason)
        self.update = None
        self._unsettled.clear()
        self.why_mixed = ""

    def abandon(self, update: Update, why: str) -> None:
        """End an update unfinished. The weights are then a mixture if a tensor was sent; `why_mixed` says `why`.

        If no tensor was sent, `why_mixed` stays: an earlier mixture remains one.
        """
        self.update = None
        if update.sent:
            self.why_mixed = (
                f"the update to version {update.version} ended unfinished ({why}), "
                "so the weights are mixed"
            )
