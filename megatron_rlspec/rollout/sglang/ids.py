"""Ids of samples. A client chooses its own, which may come twice. SGLang gets ids that are unique in the engine.

To abort an id, SGLang ends all requests whose ids begin with it. Ids made here begin with equally many random digits,
so none is the beginning of another one.
"""

from __future__ import annotations

import uuid

_MARK = "rlspec."
_PREFIX_LENGTH = len(f"{_MARK}{uuid.UUID(int=0).hex}.")


def inner(name: str) -> str:
    """Return a new id for SGLang that contains the client's id `name`."""
    return f"{_MARK}{uuid.uuid4().hex}.{name}"


def outer(rid: str) -> str:
    """Return the client's id in SGLang's id `rid`. An id of a request through SGLang's own routes stays as it is."""
    return rid[_PREFIX_LENGTH:] if rid.startswith(_MARK) else rid
