"""Speculative decoding that keeps up with reinforcement learning.

The import of the package is light: torch, Megatron-core and SGLang are imported by the modules that need them.
"""

__version__ = "0.3.0"
