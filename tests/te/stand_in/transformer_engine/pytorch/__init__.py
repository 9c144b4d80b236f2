from transformer_engine.pytorch import distributed, ops, optimizers
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module import GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "ops",
    "optimizers",
]
