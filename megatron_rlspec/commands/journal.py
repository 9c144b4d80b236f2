"""The file of `rlspec answer`: one JSON row for each answer, and `FILE.settings.json` with what all rows share.

A row holds token ids of prompt and response, both as text, why the response ended, and the row of the prompt.
`tasks/columns.py` reads the rows for `rlspec sft`. The drafter learns these ids as they are: without tokenising the
text again, and with an end token only where the model generated one. Every row is written when its answer is complete,
so a command that is started again after an interruption generates only the missing answers.

`_read` and `add` are the two sides of the format of a row: change them together, and `tasks/columns.py` with them.
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
    """The answers in a file. The caller holds the lock of the file (`answer.py`).

    path      the file; it is made if it is missing. It stays open until the process ends
    settings  `answer.settings` of this command
    prompts   prompts to answer; answers to other prompts stay in the file and are not in `done`
    done      id of the request -> status, of each answer that the file has

    Raises ConfigError if the file was written under other settings, DataError for rows that are no answers.
    """

    def __init__(self, path: Path, settings: dict[str, Any], prompts: Sequence[Prompt]) -> None:
        self.done: dict[str, str] = {}
        self._lock = threading.Lock()  # of `_file` and `done`
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
        """Fill `done` from the file. Half a row at the end, which a killed command can leave, is cut off.

        prompts  ids of the prompts to answer
        """
        with path.open("rb+") as file:
            content = file.read()
            whole_rows = content.rfind(b"\n") + 1  # bytes
            file.truncate(whole_rows)
        for number, line in enumerate(content[:whole_rows].splitlines(), 1):
            row = json_row(f"{path}:{number}", line)
            try:
                name = f"p{row['row']:09d}-n{row['sample']:07d}"  # as `answer.requests` names it
                if row["status"] not in COMPLETE or not row["response_tokens"]:
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                raise data.DataError(f"{path}:{number}: not a row of `rlspec answer`") from None
            if row["row"] in prompts:
                self.done[name] = row["status"]

    def add(self, sample: Sample, text: str) -> None:
        """Append one complete answer, with `text` as its response. Threads may call it, once for each answer.

        The sample's status must be one of `COMPLETE`, and it must have a token: `_read` refuses other rows.
        """
        # the id is pROW-nNUMBER, by `answer.requests`
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
        # one write of a whole line, so that a killed process leaves at most half a row
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()
            self.done[sample.request_id] = sample.status
