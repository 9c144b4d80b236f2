"""Speculative decoding that keeps up with reinforcement learning.

The import of the package is light: torch, Megatron-core and SGLang are imported by the modules that need them.
"""

from importlib import import_module
from typing import Any

__version__ = "0.4.0"
_PUBLIC = {
    "Config": "megatron_rlspec.config",
    "ConfigError": "megatron_rlspec.config",
    "CoTrainer": "megatron_rlspec.cotrainer.cotrainer",
    "DrafterConfig": "megatron_rlspec.config",
    "EngineError": "megatron_rlspec.engine",
    "HealthError": "megatron_rlspec.push.contract",
    "OFF": "megatron_rlspec.types",
    "Prompt": "megatron_rlspec.types",
    "Request": "megatron_rlspec.types",
    "Roofline": "megatron_rlspec.speculation.roofline",
    "SGLangEngine": "megatron_rlspec.rollout.sglang.client.engine",
    "Sample": "megatron_rlspec.types",
    "Sampling": "megatron_rlspec.types",
    "Sequences": "megatron_rlspec.cotrainer.fields",
    "SpecConfig": "megatron_rlspec.types",
    "SpecRule": "megatron_rlspec.speculation.rule",
    "Student": "megatron_rlspec.losses.drafter",
    "drafter_targets": "megatron_rlspec.packing.shift",
    "load": "megatron_rlspec.config",
}
__all__ = ["__version__", "loop", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == "loop":
        return import_module("megatron_rlspec.loop")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megatron_rlspec' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
