from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.module.norms import RMSNorm

__all__ = ["GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm"]
