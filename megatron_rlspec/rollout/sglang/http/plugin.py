"""The SGLang plugin: inert unless the environment variable `RLSPEC_SGLANG` is set, as `rlspec serve` sets it.

SGLang calls `register` in its main process, whose HTTP server gets our routes (`routes.py`) however it was launched,
and in every scheduler process. The variable holds JSON:
`{"verifier": "position_keyed", "spec_rule": {...}}`, both optional, so `RLSPEC_SGLANG={}` asks for the defaults.
`spec_rule` is what `SpecRule.from_json` takes, candidates optional; without it the rule begins with the costs that the
model's config.json implies. It corrects them by the engine's own rounds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Collection

from megatron_rlspec.host import loopback
from megatron_rlspec.models.families import FAMILIES
from megatron_rlspec.rollout.sglang.settings import Settings


def register() -> None:
    settings = Settings.from_environment()
    if settings is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megatron_rlspec.rollout.sglang.scheduler import (
        control,
        coupled,
        decisions,
        verifier,
        versions,
    )

    # refused before anything is in force: SGLang logs a plugin's errors and goes on
    sglang = versions.installed()
    if settings.architectures:
        _register_models(settings.architectures)
    decisions.decider = decisions.Decider(settings)
    from megatron_rlspec.rollout.sglang.scheduler.controller import ScheduleController

    HookRegistry.register(
        "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController",
        ScheduleController,
        HookType.REPLACE,
    )
    own = (*control.hooks(settings), *verifier.hooks(settings), *coupled.hooks(settings))
    for target, hook, kind in (*own, *sglang.hooks()):
        HookRegistry.register(target, hook, HookType[kind])
    if settings.loopback:
        loopback.bind_stores()
    _add_routes()


def _register_models(architectures: Collection[str]) -> None:
    """Import the one or two model files that are needed instead of SGLang's 250, in each of its processes."""
    # With an external model package set, SGLang imports its own models only if an architecture is unknown.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "concurrent")
    from sglang.srt.models.registry import ModelRegistry

    for name in (
        file for architecture in architectures for file in FAMILIES[architecture].sglang_files
    ):
        entries = importlib.import_module(f"sglang.srt.models.{name}").EntryClass
        for entry in entries if isinstance(entries, list) else [entries]:
            ModelRegistry.models[entry.__name__] = entry


def _add_routes() -> None:
    """Add our routes in the HTTP process: SGLang's main program, or a process started to run its server."""
    name = "sglang.srt.entrypoints.http_server"
    if name not in sys.modules and multiprocessing.parent_process() is not None:
        return
    from sglang.srt.entrypoints import http_server

    from megatron_rlspec.rollout.sglang.http.routes import add_routes

    add_routes(http_server.app)
