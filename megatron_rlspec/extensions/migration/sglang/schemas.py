"""Schemas of the routes that migration adds below /rlspec."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from megatron_rlspec.rollout.sglang import limits
from megatron_rlspec.rollout.sglang.schemas import (
    Edge,
    Nothing,
    RequestId,
    Strict,
    Text,
    TokenIds,
    Version,
)

ColumnsFolder = Annotated[str, Field(pattern=r"^(rlspec-kv-rlspec-engine-[A-Za-z0-9_]{1,64})?$")]
ColumnsName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class OfferNote(Strict):
    """A sample that may come: the tokens known of it, and how many columns it will have at most."""

    id: RequestId
    tokens: TokenIds
    upto: Edge


class Offer(Strict):
    limit: ClassVar[int] = limits.BATCH_BYTES
    rows: ClassVar[str] = "notes"
    row: ClassVar[type[Strict]] = OfferNote
    version: Version
    notes: list[OfferNote] = Field(min_length=1, max_length=limits.REQUESTS)


class ExportNote(Strict):
    """A sample whose columns from `first` on are written to the files `name` of this engine."""

    id: RequestId
    first: Edge
    name: ColumnsName


class Export(Strict):
    notes: list[ExportNote] = Field(min_length=1, max_length=limits.REQUESTS)


class DetachNote(Strict):
    """A sample that leaves; without `name`, without its columns."""

    id: RequestId
    first: Edge = 0
    name: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""


class Detach(Strict):
    notes: list[DetachNote] = Field(min_length=1, max_length=limits.REQUESTS)


class AcceptNote(Strict):
    """A sample whose columns are read from the files `name` in the folder of another engine, or in this one's."""

    id: RequestId
    name: ColumnsName
    folder: ColumnsFolder = ""


class Accept(Strict):
    notes: list[AcceptNote] = Field(min_length=1, max_length=limits.REQUESTS)


class Withdraw(Strict):
    """The samples whose room is given back; without `ids`, all of them."""

    ids: Annotated[list[Text], Field(max_length=1 << 16)] | None = None


COMMANDS: dict[str, type[Strict]] = {
    "progress": Nothing,
    "kv_describe": Nothing,
    "kv_offer": Offer,
    "kv_export": Export,
    "kv_detach": Detach,
    "kv_accept": Accept,
    "kv_withdraw": Withdraw,
    "kv_audit": Nothing,
}
