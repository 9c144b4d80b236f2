"""Speculative decoding that keeps up with reinforcement learning.

The package imports nothing heavy here: torch, Megatron-core and SGLang are loaded by the rooms that need them.
"""

__version__ = "0.2.0.dev0"
