"""[drafter]: which drafter a run has, and how it is trained.

`train/drafter_step.py` trains it within the policy's step. `extensions/drafter_schedules/` has what differs from that:
update_every, overlap, replay, replay_tokens, reward_weight, and the first steps of a fresh drafter.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import (
    FUNCTION,
    LearningRate,
    Name,
    Needs,
    Positive,
    Section,
    Text,
    Tokens,
)

# drafter.loss: those of `losses/drafter.py`; any other value names a function of the user's
LOSSES = ("ce", "forward_kl")


class DrafterConfig(Section):
    kind: Literal["mtp", "eagle3"] = Field(
        "mtp",
        description="mtp: the MTP layer of model.path; eagle3: the EAGLE-3 drafter of drafter.path, a model of its own",
    )
    path: Text = Field(
        "",
        description="with kind=eagle3: Hugging Face directory of the drafter; `rlspec convert --add-eagle3` makes one",
    )
    train: bool = Field(True, description="train the drafter together with the policy")
    fresh: Annotated[bool, Needs("drafter.train")] = Field(
        False,
        description="give a model without a drafter a new one, MTP where SGLang runs it and else EAGLE-3; the "
        "run starts without drafts, trains the drafter, and drafts when that pays",
    )
    depth: Annotated[int, Field(gt=0, le=64), Needs("drafter.train")] = Field(
        3, description="drafted tokens per position that are trained"
    )
    loss: Annotated[Name, Needs("drafter.train")] = Field(
        "forward_kl",
        description="distance to the policy p of the draft q: ce: -log q(token); forward_kl: KL(p, q); "
        "or module:function, see examples/custom_loss",
    )
    vocabulary: Annotated[int, Field(ge=0, le=1 << 24)] = Field(
        0,
        description="words that drafts are chosen from, the most frequent ones of the rollouts, renewed at every "
        "push; the drafter's head then computes these rows only; 0: all words",
    )
    depth_decay: Annotated[float, Needs("drafter.train")] = Field(
        0.8, gt=0, le=1, description="weight of depth d is depth_decay ** (d - 1)"
    )
    reward_weight: Annotated[Literal["none", "reward"], Needs("drafter.train")] = Field(
        "none",
        description="weight of a sample: 1 (none), or its reward over the mean reward, less the least one if that is "
        "negative (reward), from 1/4 to 4",
    )
    share: Annotated[
        float | None,
        Needs("drafter.train"),
        Needs("drafter.replay=none"),
        Needs("drafter.overlap=False"),
    ] = Field(
        None,
        gt=0,
        le=1,
        description="part of each step's samples that the drafter learns from, drawn anew in every step; its training "
        "costs as much less, and the policy learns from all; auto: a quarter of the tokens, but at least 2,048",
    )
    update_every: Annotated[Positive, Needs("drafter.train")] = Field(
        1, description="steps between two updates of the drafter"
    )
    overlap: Annotated[bool, Needs("drafter.train")] = Field(
        False,
        description="train the drafter on earlier rollouts while engines generate the next one; the push after the "
        "next step publishes it",
    )
    replay: Annotated[Literal["none", "newest", "uniform", "reward"], Needs("drafter.train")] = (
        Field(
            "none",
            description="none: an update learns from the step's rollouts; else from a buffer of earlier ones, in a "
            "pass of its own: the newest samples, or drawn alike, or by reward",
        )
    )
    replay_tokens: Annotated[Tokens, Needs("drafter.replay", "drafter.overlap")] = Field(
        262144,
        description="most tokens of the buffer, of which a sample counts 16 at least; an update takes as many as the "
        "newest rollout has",
    )
    lr: Annotated[LearningRate, Needs("drafter.train")] = Field(
        1e-3,
        description="learning rate of the drafter; 1e-4 for a published drafter of several thousand hidden channels",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000), Needs("drafter.train")] = Field(
        20,
        description="steps over which the drafter's learning rate rises linearly from 0; 0: none",
    )

    @model_validator(mode="after")
    def _loss_fits(self) -> DrafterConfig:
        if self.loss not in LOSSES and not FUNCTION.fullmatch(self.loss):
            raise ValueError(
                f"loss={self.loss}: expected 'ce', 'forward_kl' or module:function (got {self.loss!r})"
            )
        if self.vocabulary and self.loss not in LOSSES:
            raise ValueError(
                f"vocabulary={self.vocabulary}: a loss of your own sees all words; expected vocabulary=0, or "
                "loss=ce or forward_kl"
            )
        return self

    @model_validator(mode="after")
    def _kind_fits(self) -> DrafterConfig:
        if self.kind == "mtp":
            if self.path:
                raise ValueError(
                    f"path={self.path}: kind=mtp has its drafter in model.path; expected kind=eagle3"
                )
            return self
        if not self.path and not self.fresh:
            raise ValueError(
                "kind=eagle3 needs path, the directory of an EAGLE-3 drafter, or fresh=true; "
                "`rlspec convert --add-eagle3` makes one"
            )
        if self.loss not in LOSSES:
            raise ValueError(
                f"loss={self.loss}: a loss of your own sees all words, and kind=eagle3 drafts from a part"
            )
        if self.vocabulary:
            raise ValueError(f"vocabulary={self.vocabulary}: expected 0 with kind=eagle3")
        return self

    @property
    def separate(self) -> bool:
        """Return whether the drafter's updates are passes of their own over stored rollouts.

        The extension `drafter_schedules` makes them. Otherwise they are a part of the policy's step.
        """
        return self.overlap or self.replay != "none"

    @property
    def learns_part(self) -> bool:
        """Return whether the drafter may learn from a part of a step's samples (`share`), in the policy's step.

        How large a part, and which samples: `chosen_samples` in `run/drafter_training.py`.
        """
        return not self.separate and self.share != 1
