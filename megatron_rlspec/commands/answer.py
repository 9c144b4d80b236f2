"""`rlspec answer`: let a model write answers to prompts, on which `rlspec sft` trains a drafter.

`commands/training.py` parses the options and calls `answer`, in one process. `journal.py` writes the file. After an
interruption the same command, started again, writes the answers that are missing. Under the position-keyed verifier the
file then has the texts of a command that was not interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_rlspec import files
from megatron_rlspec.commands.journal import Journal
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.extensions.kinds import KINDS
from megatron_rlspec.noise import seed_of
from megatron_rlspec.rollout.placement import GpuLayout, devices
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.http.serve import tensor_parallel
from megatron_rlspec.rollout.start import initial_learning
from megatron_rlspec.run import identity
from megatron_rlspec.tasks import data
from megatron_rlspec.types import Prompt, Request, Sample

# Requests given to the engines in one call, as a multiple of those that they decode together. Engines idle at the end
# of a call, while the last long answers go on; a smaller number would make that more frequent.
AT_ONCE = 16


def answer(config: Config, hf_config: dict[str, Any]) -> str:
    """Write the answers that `answer.path` lacks. Returns the line that says what the file then holds.

    Raises ConfigError if the file holds answers of other settings, FileError if another process writes it, DataError
    and EngineError.
    """
    with files.locked(config.answer.path):  # a second process would write the same answers again
        path = Path(config.answer.path)
        tokenizer = data.load_tokenizer(config.model.path, config.model.trust_remote_code)
        longest = config.longest_prompt
        prompts, dropped = data.read_prompts(config.data.path, config.data, tokenizer, longest)
        # before the prompts are cut: with a larger answer.prompts the same file goes on
        shared = settings(config, prompts)
        if config.rollout.urls:
            shared["served"] = _served_weights(config)
        if config.answer.prompts:
            prompts = prompts[: config.answer.prompts]
        journal = Journal(path, shared, prompts)
        missing = [
            request for request in requests(config, prompts) if request.id not in journal.done
        ]
        speed = ""
        if missing:
            print(
                f"rlspec answer: loading {config.model.path} in {config.model.dtype}, "
                f"engine {config.rollout.engine}; {len(missing)} answers are missing in {path}",
                flush=True,
            )
            tokens, seconds = _generate(config, hf_config, missing, journal, tokenizer)
            speed = f"; {tokens} new tokens, {tokens / seconds:.0f} per second"
        left_out = f"; {dropped} prompts of more than {longest} tokens left out" if dropped else ""
        ended = list(journal.done.values()).count("finished")
        return (
            f"{path}: {len(journal.done)} answers to {len(prompts)} prompts, of which {ended} ended by themselves"
            f"{speed}{left_out}"
        )


def layout(config: Config) -> GpuLayout:
    """Return which GPUs each engine has. Raises ConfigError if there are too few.

    The layout is empty for one engine, without GPUs, for the embedded engine, and with rollout.urls. An engine that
    this command starts then sees every GPU.
    """
    rollout = config.rollout
    gpus = devices(os.environ, torch.cuda.device_count())
    if rollout.engines == 1 or not gpus or rollout.engine != "sglang" or rollout.urls:
        return GpuLayout()
    size = int(tensor_parallel(shlex.split(rollout.engine_options)))
    needed = rollout.engines * size
    if needed > len(gpus):
        raise ConfigError(
            f"rollout.engines={rollout.engines}: {needed} GPUs, {size} for each engine, "
            f"but this machine has {len(gpus)}"
        )
    engines = [gpus[first : first + size] for first in range(0, needed, size)]
    return GpuLayout("disaggregated", engines=tuple(engines))


def requests(config: Config, prompts: Sequence[Prompt]) -> Iterator[Request]:
    """Yield a request for every answer. Its seed depends on `train.seed`, the prompt's row and the answer's number.

    `journal.py` takes row and number from the id. The numbers have a fixed width (`types.Request`).
    """
    for prompt in prompts:
        for number in range(config.rollout.samples_per_prompt):
            seed = seed_of(config.train.seed, prompt.id, number)
            yield Request(f"p{prompt.id:09d}-n{number:07d}", prompt, seed)


def settings(config: Config, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the settings from which the texts of answers follow: the content of `FILE.settings.json`.

    With rollout.urls `answer` adds the key "served". If one of the settings differs, `Journal` refuses to add to the
    file. So a new key here, or a new field of `types.Sampling`, ends the use of files that exist. Under the
    position-keyed verifier drafts cannot change a text: the other options of [spec] and the drafter are then left out.

    prompts  all prompts of `data.path`, also those that `answer.prompts` leaves out
    """
    shared: dict[str, Any] = {
        "model": identity.of_model(config.model.path),
        "dtype": config.model.dtype,
        "prompts": identity.of_rows(prompts),
        "seed": config.train.seed,
        "engine": config.rollout.engine,
        **asdict(config.rollout.sampling),
        "verifier": config.spec.verifier,
    }
    if config.spec.verifier != "position_keyed":
        # the noise of a token then depends on what was drafted before
        shared["spec"] = config.spec.model_dump(mode="json")
        drafter = config.drafter.path
        shared["drafter"] = identity.of_model(drafter) if drafter else ""
    return json.loads(json.dumps(shared))  # as it is read back: lists in place of tuples


def _served_weights(config: Config) -> str:
    """Return the digest of the weights that the engines at `rollout.urls` hold.

    This command pushes nothing to them, so they may hold another model than `model.path`.

    Raises ConfigError if the engines hold different weights.
    """
    # `start` connects to the URLs and launches nothing, so the directory of its logs stays unused
    pool = EnginePool(KINDS[config.rollout.engine].start(config, Path(), GpuLayout()).wait())
    by_engine = pool.call_all(lambda engine: sorted(engine.fingerprints().items()))
    digests = {identity.of_rows(fingerprints) for fingerprints in by_engine.values()}
    if len(digests) > 1:
        raise ConfigError("rollout.urls: the engines hold different weights; expected the same")
    return digests.pop()


def _generate(
    config: Config,
    hf_config: dict[str, Any],
    missing: list[Request],
    journal: Journal,
    tokenizer: Any,
) -> tuple[int, float]:
    """Start engines, generate the missing answers and write them. Launched engines end with it, after errors, too.

    An answer that was aborted is not written: the next run of the command generates it. Returns the number of response
    tokens, and the seconds that it took without the start. Raises EngineError.

    missing  at least one request, none of them in `journal.done`
    """
    logs = Path(config.answer.path + ".logs")
    starting = KINDS[config.rollout.engine].start(config, logs, layout(config))
    try:
        starting.launch()
        engines = starting.wait()
        pool = EnginePool(engines, config.rollout.max_running_requests)
        _set_speculation(config, hf_config, pool)
        start = time.perf_counter()
        tokens = 0

        # called from threads of the pool, once an answer is complete
        def write(sample: Sample) -> None:
            if sample.status != "aborted":
                journal.add(sample, tokenizer.decode(sample.response, skip_special_tokens=True))

        size = AT_ONCE * config.rollout.max_running_requests * len(engines)
        for first in range(0, len(missing), size):
            batch = missing[first : first + size]
            samples = pool.generate(batch, config.rollout.sampling, write)
            tokens += sum(len(sample.response) for sample in samples)
            files.tell(f"{first + len(batch)} of {len(missing)} answers", sys.stderr)
        return tokens, time.perf_counter() - start
    finally:
        starting.close()


def _set_speculation(config: Config, hf_config: dict[str, Any], pool: EnginePool) -> None:
    """Give all engines the rule or the configuration that [spec] asks for."""
    if config.spec.mode == "adaptive":
        rule = initial_learning(config, hf_config).rule()
        pool.call_all(lambda engine: engine.set_spec_rule(rule))
    else:
        fixed = config.spec.config()
        pool.call_all(lambda engine: engine.set_config(fixed))
