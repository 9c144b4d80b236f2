"""Check what a run reads, before anything heavy is imported and before trainer and engines start.

This file, and what it imports, must not import torch: so a mistake is reported without waiting for that import.
`loading.py` has the checks that need the model or the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rlspec.config import Command, Config, ConfigError
from megatron_rlspec.config.effects import option
from megatron_rlspec.conversion.eagle3 import check_drafter
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.directory import Use, check_model
from megatron_rlspec.records import sinks
from megatron_rlspec.rollout.sglang.scheduler.versions import without_eagle3
from megatron_rlspec.tasks import data, rewards

# options whose value is a path that the checks below open
PATHS = ("model.path", "data.path", "data.eval_path", "sft.path", "drafter.path")


def check_inputs(config: Config, command: Command) -> None:
    """Raise ConfigError, CheckpointError (which is one) or DataError for a model, data or reward that cannot be used.

    Only rank 0 of a job checks: the others would read the same. `loading.load` has the checks of every rank. A reward's
    module is imported in a worker process.
    """
    if os.environ.get("RANK", "0") == "0":
        with naming_paths(config):
            _check(config, command)


@contextmanager
def naming_paths(config: Config) -> Iterator[None]:
    """Begin the message of an error about a missing path with the name of the option that has this path."""
    try:
        yield
    except ValueError as error:  # ConfigError and DataError are ValueErrors
        for name in PATHS:
            path = option(config, name)[0]  # its value
            # "PATH: no such file" or "PATH: no such directory": the checks begin their messages so.
            if path and str(error).lower().startswith(f"{path}: no such ".lower()):
                raise type(error)(f"{name}: {error}") from None
        raise


def _check(config: Config, command: Command) -> None:
    sinks.check_installed(config.log)
    generates = config.generates(command)
    reads_prompts = generates and command != "sft"
    drafter = config.drafter
    is_mtp = drafter.kind == "mtp"
    hf_config = model_config(
        config,
        "train",
        drafter=is_mtp and drafter.train and not drafter.fresh,
        spare=config.reserved_positions if generates else 0,  # only engines need spare positions
    )
    with_drafter(config, hf_config)  # for its checks; the result is not used
    has_eagle3 = not is_mtp and bool(drafter.path)
    if has_eagle3 and reads_prompts and config.rollout.engine == "sglang":
        if problem := without_eagle3(hf_config):
            raise ConfigError(f"drafter.kind=eagle3: {problem}, or rollout.engine=embedded")
    if reads_prompts:
        data.check_prompts(config.data.path, config.data)
    elif command == "sft":
        data.check_demonstrations(config.sft.path, config.data, config.sft.response_key)
    if generates:
        for path in config.data.evaluated.values():
            data.check_prompts(path, config.data)
        # A worker that cannot load the reward raises ConfigError.
        rewards.Scorer(config.reward.model_copy(update={"workers": 1})).close()


def model_config(config: Config, use: Use, **checks: Any) -> dict[str, Any]:
    """Return config.json of model.path. Raises CheckpointError for a model that cannot be used.

    checks  arguments of `check_model`, in place of those that follow from the configuration
    """
    return check_model(
        config.model.path,
        use,
        trust_remote_code=config.model.trust_remote_code,
        longest=config.model.max_length,
        **{"drafter": False, "spare": config.reserved_positions} | checks,
    )


def leaves_engines_open(config: Config) -> bool:
    """Return whether the user set neither the number of engines nor their size.

    config  as `config.load` returned it. A copy that was validated anew seems to have every option set, because then
            pydantic's `model_fields_set` has all of them
    """
    sized = "tensor" in config.placement.model_fields_set
    return not (sized or "engines" in config.rollout.model_fields_set)


def with_drafter(
    config: Config, hf_config: dict[str, Any], *, weights: bool = True
) -> dict[str, Any]:
    """Check the run's EAGLE-3 drafter, if it has one, and return `hf_config` with the drafter's config.json.

    weights  whether the drafter's weights are there to be checked

    Raises ConfigError.
    """
    if config.drafter.kind == "mtp" or not config.drafter.path:
        return hf_config
    typed = check_drafter(config.drafter.path, hf_config, config.model.path, weights=weights)
    return {**hf_config, DRAFTER: typed.model_dump(exclude_unset=True)}
