"""The file of `rlspec answer`: one JSON row for each answer, and `FILE.settings.json` with what all rows share.

A row holds token ids of prompt and response, both as text, why the response ended, and the row of the prompt. A drafter
learns these ids as they are: without tokenising the text again, and with an end token only where the model generated
one. Every row is written when its answer is complete, so an interrupted command goes on where it ended.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.config import ConfigError
from megatron_rlspec.run import identity
from megatron_rlspec.tasks import data
from megatron_rlspec.tasks.rows import json_row
from megatron_rlspec.types import Prompt, Sample

COMPLETE = ("finished", "truncated")  # status of an answer that is whole


class Journal:
    """The answers in a file: `done` maps the id of each to its status; `add` appends one, in one write.

    Raises ConfigError if the file was written under other settings, DataError for rows that are no answers. Half a row,
    which a killed command may have left at the end, is cut off.
    """

    def __init__(self, path: Path, settings: dict[str, Any], prompts: Sequence[Prompt]) -> None:
        self.done: dict[str, str] = {}
        self._lock = threading.Lock()
        settings_file = path.with_name(f"{path.name}.settings.json")
        if path.exists() and path.stat().st_size:
            written = files.read_json(settings_file) if settings_file.exists() else {}
            other = identity.difference(written, settings)
            if other:
                raise ConfigError(
                    f"answer.path={path}: its answers have another `{other}` ({settings_file.name}); "
                    "expected another file"
                )
            self._read(path, {prompt.id for prompt in prompts})
        else:
            files.write(settings_file, json.dumps(settings, indent=1) + "\n")
        self._file = path.open("ab")

    def _read(self, path: Path, prompts: set[int]) -> None:
        with path.open("rb+") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            row = json_row(f"{path}:{number}", line)
            try:
                name = f"p{row['row']:09d}-n{row['sample']:07d}"
                if row["status"] not in COMPLETE or not row["response_tokens"]:
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                raise data.DataError(f"{path}:{number}: not a row of `rlspec answer`") from None
            if row["row"] in prompts:
                self.done[name] = row["status"]

    def add(self, sample: Sample, text: str) -> None:
        """Append one answer; threads may call it."""
        row, number = (int(part[1:]) for part in sample.request_id.split("-"))
        prompt = sample.prompt
        entry: dict[str, Any] = {
            "row": row,
            "sample": number,
            "status": sample.status,
            "prompt": prompt.text,
            "response": text,
            "label": prompt.label,
            "metadata": dict(prompt.metadata),
        }
        if sample.seed is not None:
            entry["seed"] = sample.seed
        entry["prompt_tokens"] = prompt.tokens.tolist()
        entry["response_tokens"] = sample.response.tolist()
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()
            self.done[sample.request_id] = sample.status
