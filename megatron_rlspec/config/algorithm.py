"""[algorithm]: the policy's loss. `losses/grpo.py` computes it, and `run/batches.py` the advantages.

The user's own functions get this whole section (`custom.py`), so the names of its options are their interface.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import FUNCTION, Name, Needs, Section, Weight
from megatron_rlspec.config.model import LONGEST

# Where options of the ratio have an effect. If the trainer recomputes the log-probs, the ratio is 1 in the first
# optimizer step of a rollout. So these options need engine log-probs, several updates, or a user's loss, which may read
# every option. One of the three is enough.
RATIO = Needs("algorithm.old_logprobs=engine", "train.updates_per_rollout", "algorithm.loss")
# Where tis_clip has an effect. With old_logprobs=engine both log-probs of the weight are the engine's: it is 1.
WEIGHT = Needs("algorithm.old_logprobs=recompute", "algorithm.loss")


class AlgorithmConfig(Section):
    loss: Name = Field(
        "policy_gradient",
        description="policy_gradient: the clipped loss that ratio and clip_* describe; or module:function, "
        "see examples/custom_loss",
    )
    advantage: Name = Field(
        "group",
        description="group: reward minus the mean reward of the prompt's samples (GRPO); or module:function, "
        "see examples/custom_loss",
    )
    ratio: Annotated[Literal["token", "sequence"], RATIO] = Field(
        "token",
        description="importance ratio: of a token (GRPO), or of a sequence (GSPO); with old_logprobs=recompute "
        "it is 1 in the first of train.updates_per_rollout",
    )
    normalise_std: bool = Field(
        True, description="divide a group's advantages by the deviation of its rewards"
    )
    clip_low: Annotated[float, Field(ge=0, le=1), RATIO] = Field(
        0.2, description="the ratio is clipped below at 1 - clip_low"
    )
    clip_high: Annotated[Weight, RATIO] = Field(
        0.28, description="the ratio is clipped above at 1 + clip_high"
    )
    kl_coef: Weight = Field(0.0, description="weight of the KL divergence from model.path; 0: none")
    entropy_coef: float = Field(0.0, ge=-1e6, le=1e6, description="weight of the entropy bonus")
    aggregation: Literal["token", "sample", "constant"] = Field(
        "token",
        description="mean over all tokens (token), of each sample's mean (sample), or each sample's sum divided by "
        "rollout.max_new_tokens (constant)",
    )
    old_logprobs: Literal["recompute", "engine"] = Field(
        "recompute",
        description="denominator of the ratio: computed by the trainer, or as the engine reported it",
    )
    tis_clip: Annotated[Weight, WEIGHT] = Field(
        2.0,
        description="upper bound of the weight p_trainer / p_engine of each token (TIS); 0: no such weight, which "
        "tokens of an older policy need (rollout.staleness, rollout.partial)",
    )
    dynamic_sampling: bool = Field(
        False,
        description="drop groups whose rewards are all equal, and sample other prompts in their place (DAPO)",
    )
    overlong_tokens: Annotated[int, Field(ge=0, le=LONGEST)] = Field(
        0,
        description="the reward falls linearly by up to 1 over the last so many tokens before rollout.max_new_tokens "
        "(DAPO); 0: it does not",
    )

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        for name, built_in in (("loss", "policy_gradient"), ("advantage", "group")):
            value = getattr(self, name)
            if value != built_in and not FUNCTION.fullmatch(value):
                raise ValueError(f"{name}={value}: expected {built_in} or module:function")
        return self
