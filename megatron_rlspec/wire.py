"""Encode requests and groups of samples as MessagePack bytes, for files and digests. Nothing is pickled.

Classes are written by the names of their fields. The bytes are in state files (`run/state_file.py`) and recorded runs
(`run/trajectory.py`), and `run/identity.py` hashes them to recognise data and models. If the bytes of a value change,
old files cannot be read, and runs are not resumed.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np


def _encode_array(value: Any) -> Any:
    """Return a numpy array or number as builtin types; msgspec calls this for types that it does not know."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _decode_array(kind: type, value: Any) -> Any:
    """Return the array of what `_encode_array` wrote."""
    if kind is not np.ndarray:
        raise TypeError(f"{kind} does not travel between processes")
    # the copy makes it writable: `frombuffer` gives a view of bytes
    return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"]).copy()


_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: Any) -> bytes:
    """Return the bytes of a value, which `decode` reads."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[_T]) -> _T:
    """Return the value, of type `kind`. Raises msgspec.DecodeError for bytes that hold none."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array).decode(bytes(data))
