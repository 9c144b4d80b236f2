"""[model]: the model that is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rlspec.config.base import Section, Text

LONGEST = 2**24  # tokens of one sample
Length = Annotated[int, Field(gt=0, le=LONGEST)]


class ModelConfig(Section):
    path: Text = Field("", description="Hugging Face directory, or a name on the Hub")
    trust_remote_code: bool = Field(
        False, description="run the Python files of model.path that its tokenizer needs"
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "bfloat16", description="type of parameters, activations"
    )
    max_length: Length = Field(
        4096, description="longest sample in tokens: prompt and response together"
    )
