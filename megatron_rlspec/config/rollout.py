"""[rollout]: the engines that generate, and how they sample.

`rollout/start.py` starts the engines, and `run/generation.py` draws prompts and samples.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import (
    FUNCTION,
    MOST_TOKENS,
    Count,
    Name,
    Needs,
    Seconds,
    Section,
    Text,
)
from megatron_rlspec.config.model import Length
from megatron_rlspec.types import Sampling

MOST_SAMPLES = 2**20  # of one step; also bounds other counts of samples, and top_k
# http(s)://HOST, then perhaps :PORT and /PATH; HOST may be an IPv6 address in brackets
ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[^\s:/]+)(:[1-9]\d{0,4})?(/\S*)?")
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES)]


class RolloutConfig(Section):
    engine: Literal["sglang", "embedded"] = Field(
        "sglang",
        description="sglang: servers of their own; embedded: in the trainer's process, for small models",
    )
    urls: tuple[Name, ...] = Field(
        (),
        description="use these running `rlspec serve` engines, such as http://127.0.0.1:30000, and launch none; their "
        "key is read from the environment variable RLSPEC_API_KEY",
    )
    engines: Annotated[int, Field(gt=0, le=1024)] = Field(
        1, description="engines to launch if urls is empty"
    )
    function: Text = Field(
        "",
        description="module:function(conversation) that draws a sample in several turns, with a tool or an "
        "environment between them; empty: one reply to each prompt",
    )
    prompts_per_step: Samples = Field(32, description="prompts of one RL step")
    samples_per_prompt: Samples = Field(
        8, description="responses to each prompt: the GRPO group size"
    )
    temperature: float = Field(1.0, ge=0, le=100, description="sampling temperature; 0: greedy")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the smallest set with this probability; 1: from all",
    )
    top_k: Annotated[int, Field(ge=-1, le=MOST_SAMPLES)] = Field(
        -1, description="sample from so many most probable tokens; -1: from all"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="sample from the tokens at least so many times as likely as the likeliest; 0: all",
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        (),
        max_length=32,
        description="strings that end a response: with the first token after which its text holds one of them. That "
        "token is trained, and the reward reads the whole text",
    )
    max_new_tokens: Length = Field(1024, description="longest response in tokens")
    max_running_requests: Samples = Field(
        256, description="most requests that one engine decodes together"
    )
    max_total_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS), Needs("rollout.urls=")] = Field(
        0, description="size of one engine's KV cache in tokens; 0: what fits (65536 on a CPU)"
    )
    engine_options: Annotated[Text, Needs("rollout.engine=sglang"), Needs("rollout.urls=")] = Field(
        "",
        description="SGLang's own options for engines that the run launches, as '--attention-backend triton'; "
        "--mem-fraction-static takes the place of what CUDA graphs, logits and prefills leave",
    )
    timeout_seconds: Annotated[Seconds, Needs("rollout.engine=sglang", "rollout.function")] = Field(
        1800.0,
        description="an engine that sends nothing for so long has failed, and rollout.function, if it asks for no "
        "reply for so long; an engine that starts has 600 s at least",
    )
    restarts: Annotated[Count, Needs("rollout.engine=sglang"), Needs("rollout.urls=")] = Field(
        3, description="how often a run restarts engines it launched, if they fail"
    )
    staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        0,
        description="0: sample, then train; 1: sample the next step meanwhile, with weights one step older",
    )
    partial: Annotated[int, Field(ge=0, le=1024)] = Field(
        0,
        description="n > 0: begin twice prompts_per_step, and end a rollout when its batch is complete; the rest goes "
        "on in the next steps, and after n of them the step waits for it; 0: a rollout ends with its last sample",
    )
    mask_offpolicy: Annotated[bool, Needs("rollout.partial")] = Field(
        False,
        description="do not train the tokens that a sample had before it was continued by a later policy",
    )

    @property
    def max_lag(self) -> int:
        """Return how many versions a token may be older than the policy that trains on it; 0: of the same version."""
        return self.staleness + self.partial

    @property
    def sampling(self) -> Sampling:
        """Return how rollouts sample; evaluations change the temperature."""
        return Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            self.max_new_tokens,
            min_p=self.min_p,
            stop=self.stop,
        )

    @property
    def begun_prompts(self) -> int:
        """Return how many prompts a rollout has in progress; with `partial` twice those of a step, to go on later."""
        return 2 * self.prompts_per_step if self.partial else self.prompts_per_step

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.function and not FUNCTION.fullmatch(self.function):
            raise ValueError(
                f"function={self.function}: expected FILE.py:function or module:function"
            )
        if self.partial and self.function:
            raise ValueError(
                f"partial={self.partial} continues one reply, but function={self.function} draws several turns"
            )
        try:
            shlex.split(self.engine_options)
        except ValueError as error:
            raise ValueError(
                f"engine_options={self.engine_options}: {error}; expected options as in a shell"
            ) from None
        # -1 is "no limit", as in SGLang
        if self.top_k == 0:
            raise ValueError("top_k=0 leaves no token to sample; expected 1 or more, or -1 for all")
        if 0 < self.temperature < 0.001:
            raise ValueError(
                f"temperature={self.temperature}: expected 0 (greedy), or a number from 0.001 to 100"
            )
        if self.prompts_per_step * self.samples_per_prompt > MOST_SAMPLES:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} x samples_per_prompt={self.samples_per_prompt}: "
                f"expected at most {MOST_SAMPLES} samples a step"
            )
        if self.urls and self.engines > 1:
            raise ValueError(
                f"engines={self.engines} launches engines, but urls={','.join(self.urls)} uses running ones; "
                "expected one of the two"
            )
        for url in self.urls:
            if not ADDRESS.fullmatch(url):
                raise ValueError(f"urls={url}: not an address; expected http://HOST:PORT")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls={','.join(self.urls)}: one engine twice; expected each once")
        if self.engine == "embedded" and (self.urls or self.engines > 1):
            asked = f"urls={','.join(self.urls)}" if self.urls else f"engines={self.engines}"
            raise ValueError(f"engine=embedded runs once, inside this process, but {asked}")
        return self
