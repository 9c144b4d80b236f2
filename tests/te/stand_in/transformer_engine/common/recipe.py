"""Megatron derives a class from this when it is imported."""


class DelayedScaling: ...
