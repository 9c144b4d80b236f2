"""Encode messages between ranks, requests and groups of samples as MessagePack bytes. Nothing is pickled."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
import numpy as np

_DTYPES = tuple(np.dtype(kind).str for kind in ("i8", "i4", "u1", "f8", "f4", "?"))


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind} does not travel between processes")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data"}:
        raise ValueError("an array must have dtype, shape and data")
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if dtype not in _DTYPES or not isinstance(data, bytes) or not isinstance(shape, list):
        raise ValueError(f"an array's dtype must be one of {', '.join(_DTYPES)}, its data bytes and its shape a list")
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise ValueError("an array's shape must hold non-negative integers")
    if math.prod(shape) * np.dtype(dtype).itemsize != len(data) or len(shape) > 8:
        raise ValueError(f"an array of {len(data)} bytes does not have dtype {dtype} and shape {shape[:8]}")
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: Any) -> bytes:
    """Return the bytes of a value, which `decode` reads."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[_T]) -> _T:
    """Return the value, of type `kind`. Raises msgspec.DecodeError for bytes that hold none."""
    try:
        return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array).decode(bytes(data))
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"not a {kind.__name__}: {error}") from None
