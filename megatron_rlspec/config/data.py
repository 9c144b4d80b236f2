"""[data]: prompts to train and to evaluate on. `tasks/data.py` reads the files, and `tasks/columns.py` the rows.

`rlspec sft` reads the prompts of its demonstrations by the same options, from `sft.path`.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from megatron_rlspec.config.base import Files, Name, Needs, Section, Text


def _template_arguments(given: Any) -> Any:
    """Return the object that a command line states as JSON, or as NAME=VALUE,NAME=VALUE with values of TOML.

    Every comma separates two pairs, so a value with a comma needs the form as JSON. Texts need quotes in both forms:
    NAME="VALUE". JSON must begin with `{`, without a space before it. Raises ValueError.
    """
    if not isinstance(given, str):
        return given  # a table of a TOML file
    if given.startswith("{"):
        return json.loads(given)
    return tomllib.loads(given.replace(",", "\n"))


class DataConfig(Section):
    path: Files = Field(
        "",
        description="training prompts: .jsonl, .json or .parquet files, or patterns of names, with commas between; or "
        "a data set on the Hub, NAME?split=train&OPTION=VALUE; csv?data_files=FILE reads a CSV file by `datasets`",
    )
    eval_path: Files = Field("", description="held-out prompts, as for path; empty: no evaluation")
    # A command line splits a tuple at commas (`load._converted`): a PATH with a comma needs a list as in TOML,
    # ["NAME=PATH"].
    eval_sets: Annotated[tuple[Name, ...], Needs("data.eval_path")] = Field(
        (),
        description="further held-out prompts, each NAME=PATH: evaluations report them by name, one after the other",
    )
    prompt_key: Name = Field(
        "prompt",
        description="column of the prompt: text, or chat messages; a dot leads into an object",
    )
    label_key: Text = Field(
        "label",
        description="column of the right answer, which the reward gets as text; empty: no labels. A list of several "
        "texts accepts each of them in exact and math",
    )
    metadata_key: Text = Field(
        "metadata", description="optional column with an object, which the reward gets too"
    )
    apply_chat_template: bool = Field(
        False, description="format prompts with the tokenizer's chat template"
    )
    chat_template_kwargs: Annotated[
        dict[str, Any], BeforeValidator(_template_arguments), Needs("data.apply_chat_template")
    ] = Field(
        {}, description="arguments of the chat template, as enable_thinking=false, or as JSON"
    )
    tools_key: Text = Field(
        "tools", description="optional column with the tools that the chat template gets"
    )
    system_prompt: Text = Field(
        "", description="system message of the chat template, for prompts without one; empty: none"
    )
    shuffle: bool = Field(
        True, description="draw prompts in a new random order every epoch, seeded by train.seed"
    )

    @property
    def evaluated(self) -> dict[str, str]:
        """Return the paths of all held-out prompts, by the name of their set; the name of `eval_path` is "".

        {} without `eval_path`.
        """
        further = dict(named.split("=", 1) for named in self.eval_sets)
        return {"": self.eval_path, **further} if self.eval_path else {}

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        # a name becomes a part of metrics' names, as in eval/NAME/ (`run/recording.py`)
        for named in self.eval_sets:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}=.+", named, re.ASCII):
                raise ValueError(
                    f"eval_sets={named}: expected NAME=PATH, a name of letters, digits, '_', '-' and '.'"
                )
        if len({named.partition("=")[0] for named in self.eval_sets}) < len(self.eval_sets):
            raise ValueError(
                f"eval_sets={','.join(self.eval_sets)}: one name twice; expected each once"
            )
        if self.system_prompt and not self.apply_chat_template:
            raise ValueError(
                "system_prompt needs apply_chat_template=true, which writes it into the prompt"
            )
        return self
