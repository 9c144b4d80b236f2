"""`rlspec answer`: let a model write answers to prompts, for a drafter to be warmed up on.

A row of the JSONL file is one answer: token ids of prompt and response, both as text, why the response ended, and the
row of the prompt. A drafter learns these ids as they are: without tokenising the text again, and with an end token
only where the model drew one. Every row is written when its answer is complete, so an interrupted command goes on where
it ended. `FILE.settings.json` holds what all rows share.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rlspec import data, files
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.rollout.open import StartingEngines, learning
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import Prompt, Request, Sample, Sampling, SpecSchedule

AT_ONCE = 16  # requests given to the engines together, as a multiple of those that they decode together


def answer(config: Config, hf_config: dict[str, Any]) -> str:
    """Write the answers that `answer.path` lacks. Returns the line that says what the file then holds.

    Raises ConfigError if the file holds answers of other settings, DataError and EngineError.
    """
    path = Path(config.answer.path)
    tokenizer = data.load_tokenizer(config.model.path)
    longest = config.model.max_length - config.rollout.max_new_tokens
    prompts, dropped = data.read_prompts(config.data.path, config.data, tokenizer, longest)
    prompts = prompts[: config.answer.prompts or len(prompts)]
    journal = Journal(path, settings(config), prompts)
    missing = [request for request in requests(config, prompts) if request.id not in journal.done]
    tokens = 0
    seconds = 1.0
    if missing:
        print(
            f"rlspec answer: loading {config.model.path} ({hf_config['architectures'][0]}) in {config.model.dtype}, "
            f"engine {config.rollout.engine}; {len(missing)} answers are missing in {path}",
            flush=True,
        )
        starting = StartingEngines(config, path.with_name(f"{path.name}.logs"))
        try:
            starting.launch()
            engines = starting.wait()
            began = time.perf_counter()
            tokens = _draw(config, hf_config, list(engines.values()), missing, journal, tokenizer)
            seconds = time.perf_counter() - began
        finally:
            starting.close()
    rate = f"; {tokens} new tokens, {tokens / seconds:.0f} per second" if missing else ""
    left_out = f"; {dropped} prompts of more than {longest} tokens left out" if dropped else ""
    ended = sum(status == "finished" for status in journal.done.values())
    return (
        f"{path}: {len(journal.done)} answers to {len(prompts)} prompts, of which {ended} ended by themselves{rate}"
        f"{left_out}"
    )


def requests(config: Config, prompts: Sequence[Prompt]) -> Iterator[Request]:
    """Yield every answer to draw. Its seed depends on `train.seed`, the prompt's row and its number only."""
    for prompt in prompts:
        for number in range(config.rollout.samples_per_prompt):
            seed = np.random.SeedSequence((config.train.seed, prompt.id, number)).generate_state(1)[0]
            yield Request(f"p{prompt.id:09d}-n{number:07d}", prompt, int(seed) & 0x7FFF_FFFF)


def settings(config: Config) -> dict[str, Any]:
    """Return what the answers of one file have in common: model, prompts, template and sampling."""
    model = Path(config.model.path)
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(model.glob("*.safetensors"))]
    rollout = config.rollout
    source = Path(config.data.path)  # a file, or the name of an environment's task
    return {
        "model": hashlib.sha256(files.read_bytes(model / "config.json")).hexdigest(),
        "weights": hashlib.sha256(repr(stamps).encode()).hexdigest(),
        "dtype": config.model.dtype,
        "prompts": hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else config.data.path,
        "apply_chat_template": config.data.apply_chat_template,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_new_tokens": rollout.max_new_tokens,
        "seed": config.train.seed,
    }


class Journal:
    """The answers in a file: `done` maps the id of each to its status; `add` appends one, in one write.

    Raises ConfigError if the file was written under other settings, DataError for rows that are no answers. Half a row,
    which a killed command may have left at the end, is cut off.
    """

    def __init__(self, path: Path, settings: dict[str, Any], prompts: Sequence[Prompt]) -> None:
        self.done: dict[str, str] = {}
        self._lock = threading.Lock()
        beside = path.with_name(f"{path.name}.settings.json")
        if path.exists() and path.stat().st_size:
            known = files.read_json(beside) if beside.exists() else {}
            for key, value in settings.items():
                if not isinstance(known, dict) or known.get(key) != value:
                    raise ConfigError(
                        f"answer.path={path}: holds answers with another {key} ({beside.name}); expected another file"
                    )
            self._read(path, {prompt.id for prompt in prompts})
        else:
            files.write(beside, json.dumps(settings, indent=1) + "\n")
        self._file = path.open("ab")

    def _read(self, path: Path, prompts: set[int]) -> None:
        with path.open("rb+") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            row = data.json_row(f"{path}:{number}", line)
            try:
                if row["row"] in prompts:
                    self.done[f"p{row['row']:09d}-n{row['sample']:07d}"] = row["status"]
            except (KeyError, TypeError, ValueError):
                raise data.DataError(f"{path}:{number}: not a row of `rlspec answer`") from None

    def add(self, sample: Sample, text: str) -> None:
        """Append one answer; threads may call it."""
        row, number = (int(part[1:]) for part in sample.request_id.split("-"))
        prompt = sample.prompt
        entry: dict[str, Any] = {"row": row, "sample": number, "status": sample.status}
        entry |= {"prompt": prompt.text, "response": text, "label": prompt.label, "metadata": dict(prompt.metadata)}
        entry |= {"prompt_tokens": prompt.tokens.tolist(), "response_tokens": sample.response.tolist()}
        with self._lock:
            self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            self.done[sample.request_id] = sample.status


def _draw(
    config: Config,
    hf_config: dict[str, Any],
    engines: list[RolloutEngine],
    missing: list[Request],
    journal: Journal,
    tokenizer: Any,
) -> int:
    """Draw the missing answers and write them. Returns the number of their tokens. Raises EngineError."""
    rollout = config.rollout
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens)
    pool = EnginePool(engines)
    if config.spec.mode == "adaptive":
        rule = learning(config, hf_config).rule()
        pool.everywhere(lambda engine: engine.set_spec_rule(rule))
    else:
        pool.set_schedule(SpecSchedule.fixed(config.spec.config()))
    tokens = 0
    console = Console(stderr=True)
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(journal.done) + len(missing), completed=len(journal.done), tokens=0)

        def write(sample: Sample) -> None:
            nonlocal tokens
            if sample.status == "aborted":
                return
            journal.add(sample, tokenizer.decode(sample.response, skip_special_tokens=True))
            tokens += len(sample.response)
            progress.update(task, advance=1, tokens=tokens)

        part = AT_ONCE * rollout.max_running_requests * len(engines)
        for first in range(0, len(missing), part):
            pool.generate(missing[first : first + part], sampling, write)
    return tokens
