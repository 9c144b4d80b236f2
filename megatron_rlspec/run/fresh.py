"""Give a model without a drafter a fresh one, with which the run starts (`drafter.fresh`).

The drafter is an MTP layer if drafter.kind=mtp and the model's family can get one, else an EAGLE-3 drafter.
`commands/training.py` calls this before it settles the other options. How a fresh drafter then learns is in
`extensions/drafter_schedules/fresh.py`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.config.base import first_mistake
from megatron_rlspec.conversion.convert import config_with_drafter, convert, plan
from megatron_rlspec.conversion.drafter_files import config_of_drafter, make_drafter
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.families import record_of
from megatron_rlspec.rollout.sglang.scheduler.versions import without_eagle3
from megatron_rlspec.run import identity

LOOK_AGAIN = 0.2  # seconds between two looks for the directory that rank 0 writes
SAY_AFTER = 60.0  # seconds after which a waiting rank says what it waits for


def with_fresh_drafter(config: Config) -> Config:
    """Return the configuration of a run that starts with a fresh drafter, which rank 0 writes to the run directory.

    The directory's name follows from the model, so a resumed run finds it. Other ranks wait for it, without a time
    limit: torchrun ends them if rank 0 fails. The ranks are no job of torch.distributed yet, so they look for the
    directory. All ranks must call this.

    Raises ConfigError or CheckpointError for a model that gets none.
    """
    model = config.model.path
    hf_config = check_model(
        model, "train", drafter=False, tokenizer=False, longest=config.model.max_length
    )
    kind = _kind(config, hf_config)
    target = Path(config.train.run_dir) / f"start-{kind}-{identity.of_model(model)[:8]}"
    changed = _config_with(config, kind, target)
    if os.environ.get("RANK", "0") == "0" and not target.exists():
        print(f"rlspec: {model} gets a fresh drafter, {kind}, in {target}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        # `convert` and `make_drafter` write the directory whole or not at all: where it exists it is complete.
        if kind == "mtp":
            # `link`: only the MTP layer is written; `target` refers to the model's own files, which must stay
            convert(plan(model, target, to="hf", add_mtp=True), link=True)
        else:
            make_drafter(model, target)
    say_at = time.monotonic() + SAY_AFTER
    while not target.exists():
        time.sleep(LOOK_AGAIN)
        if time.monotonic() > say_at:
            say_at = math.inf  # once
            print(
                f"rlspec: still waiting for {target}, which rank 0 writes; expected train.run_dir in a directory that "
                "all nodes share",
                flush=True,
            )
    return changed


def describe_fresh_drafter(
    config: Config, hf_config: Mapping[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Return configuration and config.json of a run with a fresh drafter, without writing it: for `--dry-run`.

    Raises ConfigError.
    """
    kind = _kind(config, hf_config)
    changed = _config_with(config, kind, Path("(fresh)"))
    if kind == "mtp":
        return changed, config_with_drafter(hf_config)
    return changed, {**hf_config, DRAFTER: config_of_drafter(hf_config)}


def _kind(config: Config, hf_config: Mapping[str, Any]) -> str:
    """Return the kind of the fresh drafter, "mtp" or "eagle3".

    hf_config  the model's config.json

    Raises ConfigError for a model that has a drafter, or can get none.
    """
    options, model = config.drafter, config.model.path
    if options.path:
        raise ConfigError(
            f"drafter.fresh=true makes a drafter, but drafter.path={options.path}; expected one of the two"
        )
    if hf_config.get("num_nextn_predict_layers"):
        raise ConfigError(
            f"drafter.fresh=true: {model} has a drafter; expected drafter.fresh=false"
        )
    if options.kind == "mtp" and record_of(hf_config).added_drafter:
        return "mtp"
    if config.rollout.engine == "sglang" and (problem := without_eagle3(hf_config)):
        raise ConfigError(
            f"drafter.fresh=true: {problem}, or a family with an MTP layer (docs/families.md)"
        )
    return "eagle3"


def _config_with(config: Config, kind: str, target: Path) -> Config:
    """Return the configuration of a run with the fresh drafter in `target`. Raises ConfigError if it does not fit."""
    if kind == "mtp":
        # An MTP layer is a part of the model: `target` holds both.
        model = config.model.model_copy(update={"path": str(target)})
        return config.model_copy(update={"model": model})
    # An EAGLE-3 drafter has a directory of its own, and its options have other limits: validate them again.
    drafter = config.drafter.model_dump() | {"kind": kind, "path": str(target)}
    try:
        return Config.model_validate(config.model_dump() | {"drafter": drafter})
    except ValidationError as error:
        raise ConfigError(
            f"drafter.fresh=true: {config.model.path} gets an EAGLE-3 drafter{first_mistake(error)}"
        ) from None
