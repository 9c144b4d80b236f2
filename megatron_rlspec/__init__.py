"""Speculative decoding that keeps up with reinforcement learning.

The import of the package is light: torch, Megatron-core and SGLang are imported by the modules that need them.
"""

from importlib import import_module
from typing import Any

__version__ = "0.4.0"
_PUBLIC = {
    "CoTrainer": "megatron_rlspec.cotrainer.cotrainer",
    "Sequences": "megatron_rlspec.cotrainer.fields",
    "DrafterConfig": "megatron_rlspec.config",
    "Prompt": "megatron_rlspec.types",
    "Request": "megatron_rlspec.types",
    "Sample": "megatron_rlspec.types",
    "Sampling": "megatron_rlspec.types",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megatron_rlspec' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
