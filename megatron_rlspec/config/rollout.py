"""[rollout]: engines and sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Count, Positive, Section


class RolloutConfig(Section):
    engine: Literal["sglang", "embedded"] = Field("sglang", description="which engine generates")
    urls: tuple[str, ...] = Field(
        (),
        description="attach to these running engines instead of launching; their key: the environment's RLSPEC_API_KEY",
    )
    engines: Positive = Field(1, description="engines to launch when no url is given")
    prompts_per_step: Positive = Field(32, description="prompts of one RL step")
    samples_per_prompt: Positive = Field(8, description="GRPO group size")
    temperature: float = Field(1.0, ge=0, description="sampling temperature of the rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 filters nothing")
    top_k: int = Field(-1, description="-1 filters nothing")
    max_new_tokens: Positive = Field(1024, description="longest response")
    max_running_requests: Positive = Field(256, description="decode batch limit of one engine")
    max_total_tokens: Positive = Field(65536, description="KV cache of one engine, in tokens")
    mem_fraction: float = Field(0.7, gt=0, lt=1, description="share of GPU memory for weights and KV cache")
    timeout_seconds: float = Field(1800.0, gt=0, description="a longer silence counts as an engine failure")
    restarts: Count = Field(3, description="times a run starts an engine of its own again that died or fell silent")
    staleness: int = Field(
        0, ge=0, le=1, description="1: the next step's samples are drawn while this one trains, by weights a step older"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.top_k < -1 or self.top_k == 0:
            raise ValueError(f"top_k={self.top_k} leaves no token; expected 1 or more, or -1 to filter nothing")
        if self.urls and self.engines > 1:
            raise ValueError(
                f"engines={self.engines} asks to launch, but urls={','.join(self.urls)} to attach; take one"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls={url}, expected http://HOST:PORT")
        if self.engine == "embedded" and (self.urls or self.engines > 1):
            asked = f"urls={','.join(self.urls)}" if self.urls else f"engines={self.engines}"
            raise ValueError(f"engine=embedded runs once, inside this process, but {asked}")
        return self
