"""Check the options of `rlspec serve`: address, options without effect, model directories. SGLang is not imported.

`serve.main` calls `check` first, then `installed_sglang` and `dtype_of`. What is wrong is said here in one line, as
ConfigError, and not by SGLang minutes later.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rlspec.config import ConfigError
from megatron_rlspec.conversion.eagle3 import check_drafter, environment_of
from megatron_rlspec.host.loopback import is_loopback
from megatron_rlspec.models import hub
from megatron_rlspec.models.config import CheckpointError
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.headers import DTYPES, read_headers, read_object
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.settings import KEY

# Options that have an effect only with drafts, by their names in the parser of `serve.py`.
_OF_DRAFTS = (
    "num_steps",
    "candidate_steps",
    "drafts",
    "draft_vocabulary",
    "draft_model",
    "ragged",
)


def installed_sglang() -> versions.Sglang0523:
    """Return the adapter to the installed SGLang. Raises ConfigError if none is installed, or none fits."""
    try:
        return versions.installed()
    except ImportError as error:
        raise ConfigError(str(error)) from None


def dtype_of(model: str | Path) -> str:
    """Return the type of a model directory's weights, such as "float32": config.json's, else the first stored tensor's.

    model  a local directory, as `check` leaves it in `options.model`

    SGLang's own default, "auto", serves a float32 model in float16. Raises ConfigError.
    """
    try:
        config = read_object(Path(model) / "config.json")
        for section in (config, config.get("text_config") or {}):
            if stated := section.get("dtype") or section.get("torch_dtype"):
                return str(stated)
        headers = read_headers(Path(model))
    except CheckpointError as error:
        raise ConfigError(f"--model {model}: {error}") from None
    return DTYPES[next(iter(headers.values())).dtype]


def check(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    """Check address, options and model directories. Raises ConfigError.

    Two things are changed: `options.model` and `options.draft_model` become local directories, and this process's
    environment gets the variables that an EAGLE-3 drafter needs. So call it before SGLang starts, and before
    `serve.arguments_for` reads the directories.

    options  of `serve.parser`, with the API key filled in
    default  returns the default of an option of `serve.parser`
    """
    _check_address(options)
    options.model = hub.local(options.model)
    options.draft_model = hub.local(options.draft_model)
    if not (Path(options.model) / "config.json").is_file():
        raise ConfigError(
            f"--model {options.model}: no config.json there; expected a Hugging Face directory; "
            "`rlspec convert` makes one of a Megatron checkpoint"
        )
    _check_effects(options, default)
    _check_model(options)


def _check_effects(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    """Raise ConfigError for an option that differs from its default and that the other options leave without effect.

    An option that the user gave with its default value passes.
    """
    useless = {}  # option -> the option that leaves it without effect; a later reason replaces an earlier one
    if options.drafts == "argmax":
        useless["ragged"] = "--drafts argmax"
    if options.verifier != "position_keyed":
        useless |= dict.fromkeys(("drafts", "ragged"), f"--verifier {options.verifier}")
    if options.spec == "fixed":
        useless |= dict.fromkeys(("candidate_steps", "ragged"), "--spec fixed")
    if options.spec == "off":  # last and alone: without drafts none of the reasons above matters
        useless = dict.fromkeys(_OF_DRAFTS, "--spec off")
    for name, cause in useless.items():
        if getattr(options, name) != default(name):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with {cause}")


def _check_model(options: argparse.Namespace) -> None:
    """Check --model, and --draft-model beside it. The tokenizer's files may be absent: clients send token ids."""
    drafts = options.spec != "off"
    try:
        config = check_model(
            options.model, "serve", drafter=drafts and not options.draft_model, tokenizer=False
        )
    except CheckpointError as error:
        raise ConfigError(f"--model {options.model}: {error}") from None
    if drafts and options.draft_model:
        _check_drafter(options, config)


def _check_drafter(options: argparse.Namespace, target: Mapping[str, Any]) -> None:
    """Check the EAGLE-3 drafter of --draft-model; `target` is config.json of --model.

    Sets the environment variables that SGLang needs for this drafter.
    """
    given = f"--draft-model {options.draft_model}"
    if options.draft_vocabulary:
        raise ConfigError(
            f"{given}: an EAGLE-3 drafter has a draft vocabulary of its own; expected no --draft-vocabulary"
        )
    if problem := installed_sglang().without_eagle3(target):
        raise ConfigError(f"{given}: {problem}")
    try:
        drafter = check_drafter(options.draft_model, target, options.model)
    except CheckpointError as error:
        raise ConfigError(f"{given}: {error}") from None
    # Only where the user has set no value.
    for name, value in environment_of(drafter, target).items():
        os.environ.setdefault(name, value)


def _check_address(options: argparse.Namespace) -> None:
    """Check port, key and host. The port is tried now, because SGLang opens it only after it has loaded the model."""
    if not 1 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: expected a port from 1 to 65535")
    if options.api_key and not (options.api_key.isascii() and options.api_key.isprintable()):
        raise ConfigError(
            f"the key of --api-key or {KEY} must consist of printable ASCII characters"
        )
    if not is_loopback(options.host) and not options.api_key:
        raise ConfigError(
            f"--host {options.host} is reachable from outside: give --api-key or {KEY}, or listen on 127.0.0.1"
        )
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
        # As a server does it: a port with old connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
            ) from None
