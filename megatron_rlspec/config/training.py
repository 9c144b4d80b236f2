"""[optimizer], [health], [train]: the steps of a run.

`train/optimizer.py` reads [optimizer]; `run/session.py` and its parts read [health] and [train].
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from megatron_rlspec.config.base import (
    Count,
    LearningRate,
    Name,
    Needs,
    Positive,
    Section,
    Tokens,
    Weight,
)

# Some generators of random numbers take 32 bits, and some are seeded with train.seed plus a small number
# (`train/step.py`). The bound leaves room for that.
MOST_SEED = 2**31 - 1


class OptimizerConfig(Section):
    """[optimizer]: Adam for the policy."""

    lr: LearningRate = Field(1e-6, description="learning rate of the policy")
    warmup_steps: Count = Field(
        0, description="optimizer steps over which the learning rate rises linearly from 0"
    )
    decay_steps: Count = Field(
        0,
        description="optimizer steps until both learning rates, also drafter.lr, have fallen linearly to a tenth; "
        "0: no fall",
    )
    weight_decay: Weight = Field(0.0, description="AdamW's decoupled weight decay")
    beta2: float = Field(
        0.95, ge=0, lt=1, description="Adam's decay of the mean squared gradient, drafter too"
    )
    clip_grad: Weight = Field(
        1.0,
        description="largest norm of the policy's gradient, and of the drafter's; 0: not clipped",
    )
    distributed: bool | None = Field(
        None,
        description="split Adam's state over data-parallel ranks (Megatron's, ZeRO-1); auto: on with more than one of "
        "them on GPUs",
    )
    offload: bool | None = Field(
        None,
        description="keep Adam's state and the float32 weights in host memory while engines on the ranks' GPUs "
        "generate (bfloat16 models); auto: on where the KV cache is too small for a step's samples without it",
    )

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if 0 < self.decay_steps < self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} end before warmup_steps={self.warmup_steps} do"
            )
        return self


class HealthConfig(Section):
    """[health]: checks of a training step."""

    logprob_gap: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="skip a step if log-probabilities of engine and trainer differ by more, on average, in nats; auto: "
        "0.5 in bfloat16, 0.01 in float32, and after three steps five times the run's own level",
    )


class TrainConfig(Section):
    """[train]: steps, seed, checkpoints and evaluations."""

    steps: Positive = Field(100, description="RL steps, each with one rollout")
    updates_per_rollout: Annotated[int, Field(gt=0, le=1024)] = Field(
        1,
        description="optimizer steps on each rollout: its prompts are divided into so many mini-batches, with all "
        "samples of a prompt in one. The ratio is to the policy before the first; losses are means over a mini-batch",
    )
    tokens_per_micro_batch: Tokens = Field(
        8192, description="most tokens that a data-parallel rank packs into one micro-batch"
    )
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = Field(
        1, description="seed of the data's order, of sampling and of fresh parameters"
    )
    deterministic: bool = Field(
        False,
        description="compute the same bits again on a GPU: without it, attention over more than one block of keys adds "
        "gradients in any order, and two runs differ, with or without a drafter",
    )
    run_dir: Name = Field("runs/run", description="directory that the run writes to")
    save_every: Count = Field(
        20,
        description="steps between checkpoints, of which the newest two stay; 0: only at the end, on Ctrl-C and on "
        "SIGTERM",
    )
    export_every: Count = Field(
        0,
        description="steps between models of policy and drafter in run_dir/hf-step-N, which all stay; 0: only hf/",
    )
    save_best: Annotated[bool, Needs("data.eval_path")] = Field(
        False,
        description="keep the policy of the highest reward on data.eval_path, and its drafter, in run_dir/hf-best",
    )
    resume: bool = Field(False, description="continue from the newest checkpoint in run_dir")
    eval_every: Count = Field(
        20,
        description="steps between evaluations on data.eval_path; 0: only before the first and after the last",
    )
    eval_prompts: int = Field(128, gt=0, le=2**20, description="held-out prompts of one evaluation")
    eval_samples: Annotated[int, Field(gt=0, le=2**20), Needs("data.eval_path")] = Field(
        1,
        description="responses to each of them; with n, evaluations report pass_k, the best reward of k, up to k = n",
    )
    eval_temperature: Annotated[float, Needs("data.eval_path")] = Field(
        -1.0,
        ge=-1,
        le=100,
        description="sampling temperature of evaluations; 0: greedy; -1: rollout.temperature",
    )

    @field_validator("eval_temperature")
    @classmethod
    def _a_temperature(cls, value: float) -> float:
        """Refuse negative numbers other than -1, which the field's bounds allow."""
        if -1 < value < 0:
            raise ValueError("expected 0 or more, or -1 for rollout.temperature")
        return value

    drift_every: Count = Field(
        10,
        description="steps between measurements of how far the policy is from model.path, on 16 samples; each rank "
        "keeps a copy of its part of model.path on the CPU; 0: none",
    )
    record_gib: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="keep every step's rollouts and policy, for `rlspec replay`, in run_dir/trajectory, until its "
        "files would exceed so many GiB; 0: keep none",
    )
    max_bad_steps: Count = Field(
        3,
        description="stop after so many steps in a row that were skipped (a loss or gradient that is not finite, "
        "log-probabilities that differ by more than health.logprob_gap), or in which every reward "
        "failed; one is enough if no reward has succeeded yet; 0: never",
    )
