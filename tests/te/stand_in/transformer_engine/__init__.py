"""Layers with Transformer Engine's names, keywords, parameters and attributes, in plain torch, for a CPU.

What it shows: which classes Megatron builds from our layer specs, with which keywords; names, shapes and attributes of
parameters; which rank holds which part, and what is summed over ranks; the mathematics.

What it does not show: NVIDIA's kernels, their rounding and their speed; FP8; which attention backend is chosen, and
whether one exists for a shape; overlap of communication. Those need a GPU (docs/design.md).
"""

from transformer_engine import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
