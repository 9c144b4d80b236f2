"""Encode groups of samples as MessagePack bytes, and decode them by type. Nothing is pickled."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megatron_rlspec.types import Group


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    raise TypeError(f"{kind} cannot be decoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(list[Group], dec_hook=_decode_array)


def encode_groups(groups: list[Group]) -> bytes:
    """Return the bytes that `decode_groups` reads."""
    return _encoder.encode(groups)


def decode_groups(data: bytes) -> list[Group]:
    """Return the groups. Raises msgspec.DecodeError for bytes that hold none."""
    return _decoder.decode(data)
