from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]
