"""Ids of samples. A client chooses its own, which may come twice. SGLang gets ids that are unique in the engine.

SGLang aborts all ids that begin with the one that is given. None of ours begins with another one: all of them begin
with the same number of random digits.
"""

from __future__ import annotations

import uuid

_MARK = "rlspec."
_BEFORE = len(f"{_MARK}{uuid.UUID(int=0).hex}.")


def inner(name: str) -> str:
    """Return a new id for SGLang."""
    return f"{_MARK}{uuid.uuid4().hex}.{name}"


def outer(rid: str) -> str:
    """Return the client's id. A request of SGLang's own routes has one id only."""
    return rid[_BEFORE:] if rid.startswith(_MARK) else rid
