"""[model]: the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rlspec.config.base import Positive, Section


class ModelConfig(Section):
    path: str = Field("", description="Hugging Face directory of the policy, with its MTP tensors")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("bfloat16", description="parameter and activation type")
    max_length: Positive = Field(4096, description="longest sample, prompt and response, in tokens")
    moe_router_bias_update_rate: float = Field(0.0, ge=0, description="step of the routers' biases towards balance")
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="weight of the loss that balances experts; 0: none")
