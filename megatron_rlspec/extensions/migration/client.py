"""The client's side of a migration between SGLang engines. KV caches travel in files of a /dev/shm that both have.

A migration of samples from one engine to another is

    reserve   `offer` at the target
    copy      `export` at the source, `accept` at the target, while the samples go on
    switch    `detach` at the source, `accept` at the target, `generate` of the rest at the target

Every step may fail or be refused. Then the target computes the columns itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rlspec.extensions.migration.protocol import KVTransfer, Reservation, TransferRequest
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Held, Load

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Place:
    """Where an engine leaves KV caches: a name of its /dev/shm, and a folder there."""

    node: str
    folder: str


class MigratableSGLangEngine(SGLangEngine):
    """An engine of `rlspec serve --extensions migration`: running samples leave it and arrive with their KV cache."""

    @property
    def node(self) -> str:
        """Name the /dev/shm of the engine's ranks; the engine's own URL if they do not share one. Raises EngineError.

        Engines of one name read each other's files.
        """
        return self.place.node

    @cached_property
    def place(self) -> Place:
        """Return where the engine leaves KV caches; it is asked once. Raises EngineError."""
        found = self.post("control/kv_describe")
        try:
            return Place(str(found["shared_memory"]) or self.url, str(found["columns"]))
        except (KeyError, TypeError, ValueError):
            raise self.not_an_engine("control/kv_describe", found) from None

    def progress(self) -> Load:
        """Return what the engine decodes now, and its free room.

        A resumed sample's `prompt` includes what it was resumed with.
        """
        found = self.post("control/progress")
        try:
            running = tuple(Held(*row) for row in found["running"])
            version, tp = int(found["version"]), int(found["tp"])
            return Load(
                self.url, running, found["waiting"], found["free_tokens"], version, tp, self.node
            )
        except (KeyError, TypeError, ValueError):
            raise self.not_an_engine("control/progress", found) from None

    def offer(self, version: int, notes: Sequence[TransferRequest]) -> list[Reservation]:
        """Reserve room for samples until they arrive, `withdraw`, or a push. Raises RefusedError for other versions."""
        rows = [
            {"id": note.id, "tokens": note.tokens.tolist(), "upto": note.upto} for note in notes
        ]
        answers = self._answers("control/kv_offer", {"version": str(version), "notes": rows})
        return [
            Reservation(row["id"], row.get("first", 0), row.get("refused", "")) for row in answers
        ]

    def export(self, grants: Sequence[Reservation]) -> list[KVTransfer]:
        """Write the columns that are final, from `Reservation.first` on, into files, while the samples go on."""
        return self._send_off("control/kv_export", grants)

    def detach(self, grants: Sequence[Reservation], columns: bool = True) -> list[KVTransfer]:
        """End samples after their next round, as `abort` does, and write their columns from `Reservation.first` on.

        columns  False: write none, for samples that are recomputed

        Their `generate` returns what they have, and the files are there then. A sample that ends in that round is
        returned as ended.
        """
        return self._send_off("control/kv_detach", grants, columns)

    def _send_off(
        self, path: str, grants: Sequence[Reservation], columns: bool = True
    ) -> list[KVTransfer]:
        names = {grant.id: uuid.uuid4().hex if columns else "" for grant in grants}
        files = {
            name: f"{_SHARED_MEMORY}/{self.place.folder}/{file}" if file else ""
            for name, file in names.items()
        }
        rows = [{"id": grant.id, "first": grant.first, "name": names[grant.id]} for grant in grants]
        return [
            KVTransfer(
                row["id"],
                files[row["id"]],
                row.get("last", 0),
                row.get("bytes", 0),
                row.get("refused", ""),
            )
            for row in self._answers(path, {"notes": rows})
        ]

    def accept(self, cargo: Sequence[KVTransfer]) -> list[KVTransfer]:
        """Read the files, all or none of each sample. Their columns are kept until samples arrive, or `withdraw`."""
        rows = []
        for piece in cargo:
            folder, name = piece.path.split("/")[-2:]
            rows.append({"id": piece.id, "folder": folder, "name": name})
        return [
            KVTransfer(
                row["id"],
                last=row.get("last", 0),
                bytes=row.get("bytes", 0),
                refused=row.get("refused", ""),
            )
            for row in self._answers("control/kv_accept", {"notes": rows})
        ]

    def withdraw(self, request_ids: Sequence[str] | None = None) -> None:
        """Give up what is kept for these samples, or for all, that have not arrived."""
        self.post(
            "control/kv_withdraw", json={} if request_ids is None else {"ids": list(request_ids)}
        )

    def _answers(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        found = self.post(path, json=body)
        asked = [note["id"] for note in body["notes"]]
        if [row.get("id") for row in found.get("answers", [])] != asked:
            raise self.not_an_engine(path, found)
        return found["answers"]
