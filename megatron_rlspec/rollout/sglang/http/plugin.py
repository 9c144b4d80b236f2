"""The SGLang plugin: inert unless the environment variable `RLSPEC_SGLANG` is set, as `rlspec serve` sets it.

SGLang calls `register` in its main process, whose HTTP server gets our routes (`routes.py`) however it was launched,
and in every scheduler process. The variable is 1 for the defaults, or JSON with fields of `settings.Settings`:
`{"verifier": "position_keyed", "num_steps": 3}`. Without `num_steps` a rule chooses. The rule begins with the costs
that the model's config.json implies, and corrects them by the engine's own rounds.

SGLang finds `register` by the entry point `sglang.srt.plugins` in pyproject.toml. This module imports nothing heavy at
its top, because every SGLang server of this Python environment imports it, also those without the variable.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rlspec.rollout.sglang.settings import Settings


def register() -> None:
    """Activate the plugin if RLSPEC_SGLANG is set.

    Ends the process with one line if that fails: SGLang would log an exception and serve without the plugin.
    Not safe to repeat: routes and hooks would come twice. SGLang's `load_plugins` calls it once a process.
    """
    if "RLSPEC_SGLANG" not in os.environ:
        return
    try:
        from megatron_rlspec.rollout.sglang.settings import Settings

        _register(Settings.from_environment())
    except Exception as error:
        raise SystemExit(
            f"rlspec: RLSPEC_SGLANG is set, but the plugin cannot register: {error}"
        ) from None


def _register(settings: Settings) -> None:
    """Register all hooks of this package in this process, and add our routes in the HTTP process.

    Raises ValueError for settings that this SGLang cannot run.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megatron_rlspec.host import loopback
    from megatron_rlspec.rollout.sglang.scheduler import (
        control,
        coupled,
        decisions,
        ragged,
        verifier,
        versions,
    )

    sglang = versions.installed()
    if settings.ragged and not (sglang.ragged and coupled.active(settings)):
        raise ValueError(
            "ragged=true needs SGLang 0.5.23, verifier=position_keyed and drafts=coupled"
        )
    if settings.architectures:
        _register_models(settings.architectures)
    # Hooks and commands read this global at every round, always through its module. It must have the settings before
    # any of them runs.
    decisions.decider = decisions.Decider(settings)
    from megatron_rlspec.rollout.sglang.scheduler.controller import DraftController

    HookRegistry.register(
        "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController",
        DraftController,
        HookType.REPLACE,
    )
    # (name in SGLang, our function, BEFORE, AFTER, AROUND or REPLACE). SGLang only logs a name that it does not have;
    # the tests compare all names with each version of SGLang.
    hooks = [*control.hooks(settings), *verifier.hooks(settings), *coupled.hooks(settings)]
    hooks += ragged.hooks(settings)
    hooks.append(
        ("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", _refuse_options, "BEFORE")
    )
    for target, hook, kind in (*hooks, *sglang.hooks()):
        HookRegistry.register(target, hook, HookType[kind])
    if settings.loopback:
        loopback.bind_stores()
    _add_routes()


def _refuse_options(engine: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """End a server with options that adaptive speculation cannot be combined with, before it starts its processes.

    A hook of kind BEFORE: it gets the arguments of SGLang's `Engine._launch_subprocesses`. It must return None, because
    anything else would replace these arguments.
    """
    from megatron_rlspec.rollout.sglang.settings import why_refused

    if server_args.speculative_adaptive and (reason := why_refused(server_args)):
        raise SystemExit(
            f"rlspec: RLSPEC_SGLANG is set with --speculative-adaptive, but {reason}; remove that option, or serve "
            "without drafts (`rlspec serve --spec off`)"
        )


def _register_models(architectures: Collection[str]) -> None:
    """Import the one or two model files that are needed instead of SGLang's 250, in each of its processes.

    architectures  as in config.json; each is a key of `FAMILIES` with `sglang_files` (`serve._architectures`)
    """
    # With an external model package set, SGLang imports its own models only if an architecture is unknown. "concurrent"
    # is a package of the standard library without any model in it.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "concurrent")
    from sglang.srt.models.registry import ModelRegistry

    from megatron_rlspec.models.families import FAMILIES

    for name in (
        file for architecture in architectures for file in FAMILIES[architecture].sglang_files
    ):
        entries = importlib.import_module(f"sglang.srt.models.{name}").EntryClass
        for entry in entries if isinstance(entries, list) else [entries]:
            ModelRegistry.models[entry.__name__] = entry


def _add_routes() -> None:
    """Add our routes in the HTTP process: SGLang's main program, or a process started to run its server."""
    name = "sglang.srt.entrypoints.http_server"
    # A child process that has not imported the HTTP server is a scheduler: importing it there would only cost time.
    if name not in sys.modules and multiprocessing.parent_process() is not None:
        return
    from sglang.srt.entrypoints import http_server

    from megatron_rlspec.rollout.sglang.http.routes import add_routes

    add_routes(http_server.app)
