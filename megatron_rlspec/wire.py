"""Encode messages between ranks, requests and groups of samples as MessagePack bytes. Nothing is pickled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np

from megatron_rlspec.types import Group

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


def check_groups(groups: Iterable[Group], words: int) -> None:
    """Raise ValueError, which says what is wrong, for groups that no run of a model of so many words has written."""
    for group in groups:
        for sample in group.samples:
            where = f"sample {sample.request_id[:80]}"
            for name, array in (("prompt", sample.prompt.tokens), ("tokens", sample.tokens)):
                check_tokens(array, words, f"{where}: {name} holds")
            if not np.array_equal(sample.tokens[: sample.prompt_len], sample.prompt.tokens):
                raise ValueError(f"{where}: its tokens do not begin with those of its prompt")
            if not np.isin(sample.loss_mask, (0, 1)).all():
                raise ValueError(f"{where}: loss_mask holds other values than 0 and 1")
            if not (np.isfinite(sample.behaviour_logprobs).all() and math.isfinite(sample.reward)):
                raise ValueError(f"{where}: a log-probability or the reward is not finite")


def check_tokens(tokens: np.ndarray, words: int, holds: str) -> None:
    """Raise ValueError unless these are token ids of a vocabulary of so many. `holds`: how the message begins."""
    if tokens.ndim != 1 or tokens.dtype.kind != "i" or not ((tokens >= 0) & (tokens < words)).all():
        raise ValueError(f"{holds} no token ids below {words}")
