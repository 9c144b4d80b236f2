"""One line that says what is in force in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rlspec.types import SpecConfig


def in_force(described: Mapping[str, Any]) -> str:
    """Return the line for the answer of the command `describe`."""
    drafts = "no drafts"
    if described["rule"]:
        counts = {SpecConfig.from_json(value).num_steps for value in described["configs"]}
        steps = ",".join(map(str, sorted(counts)))
        drafts = f"{described['drafts']} drafts, {steps} a round by {described['rule']}"
    elif described["speculative"]:
        drafts = f"{described['drafts']} drafts, as many as SGLang was launched with"
    largest = described["graphs"]
    graphs = f"graphs up to batch {largest}" if largest else "no graphs"
    overlap = "overlap scheduler" if described["overlap"] else "no overlap"
    return (
        f"in force: verifier {described['verifier']}, {drafts}; sampling by {described['kernels']}, "
        f"attention {described['attention']}, {overlap}, {graphs}, {described['dtype']}"
    )
