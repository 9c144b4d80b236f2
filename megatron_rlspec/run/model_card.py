"""The model card of a run's result: what the model is, and the commands that use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from megatron_rlspec import __version__

# key of `Records.about` (`steps`, and keys of a step's record and of evaluations) -> what the card calls it
FIGURES = {
    "steps": "steps",
    "eval/reward": "mean reward on held-out prompts, newest evaluation",
    "rollout/reward": "mean reward, last step",
    "rollout/accept_length": "accept length (tokens a decode round), last step",
}
# SGLang's options for a chain of three drafts: num-draft-tokens counts the token before them, too
DRAFT_OPTIONS = """--speculative-num-steps 3 \\
        --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"""
UNEXPECTED = """\
Transformers lists the drafter's tensors (`mtp`) as unexpected, because it does not use them.

"""


def card(
    base: str,
    about: Mapping[str, float],
    result: Path,
    eagle3: Path | None = None,
    has_mtp: bool = False,
) -> str:
    """Return the text of README.md, the model card of a result (`result.py`).

    Its commands name directories without their parents, so they work in the directory that holds them.

    base     directory of the model that the run began with
    about    figures of the run, of which the card shows those of `FIGURES`
    result   the model's directory
    eagle3   directory of its EAGLE-3 drafter; None: it has none
    has_mtp  whether the model has an MTP drafter; not with `eagle3`
    """
    name = result.name
    kind = "reinforcement learning" if "rollout/reward" in about else "supervised training"
    figures = ""
    for key, label in FIGURES.items():
        value = about.get(key)  # None also where a record that was read from disk has null, for NaN
        if value is not None and math.isfinite(value):
            figures += f"| {label} | {value:.4g} |\n"
    launch = f"python -m sglang.launch_server --model-path {name}"
    unexpected = ""
    if has_mtp:
        unexpected = UNEXPECTED
        launch += f" --speculative-algorithm NEXTN {DRAFT_OPTIONS}"
    if eagle3 is not None:
        drafter = f"--speculative-draft-model-path {eagle3.name} {DRAFT_OPTIONS}"
        launch += f" --speculative-algorithm EAGLE3 \\\n        {drafter}"
    return f"""---
library_name: transformers
---

# {Path(base).name}, after {kind}

Trained from {Path(base).name} with megatron_rlspec {__version__}.

| | |
|---|---|
{figures}
With Transformers:

    AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")

{unexpected}With SGLang:

    {launch}
"""
