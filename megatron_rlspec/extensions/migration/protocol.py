"""What SGLang engines tell each other about a running sample that goes from one to the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TransferRequest:
    """Announces a sample to the engine that will receive it.

    tokens  those known of it, at least its prompt
    upto    columns of the KV cache that it will have at most when it comes
    """

    id: str
    tokens: np.ndarray
    upto: int


@dataclass(frozen=True)
class Reservation:
    """Slots of the target for one sample: columns below `first` are there already; `refused` says why it has none."""

    id: str
    first: int = 0
    refused: str = ""


@dataclass(frozen=True)
class KVTransfer:
    """KV-cache columns of a sample in transfer. `refused` says why there are none."""

    id: str
    path: str = ""
    last: int = 0
    bytes: int = 0
    refused: str = ""
