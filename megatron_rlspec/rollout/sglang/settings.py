"""Settings that every SGLang process of ours shares: the plugin's, the server's API key, and what excludes drafts.

Settings and key travel in environment variables, because SGLang starts its scheduler processes itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_rlspec.types import SHARPNESS, Drafts, Verifier

VARIABLE = "RLSPEC_SGLANG"
KEY = "RLSPEC_API_KEY"  # in the environment: every user of the machine can read a command line
# Key of SGLang's answer's `meta_info`: for every output token, 1 if it was a draft, else 0. `scheduler/control.py`
# writes it; `http/routes.py` and `integrations/slime/acceptance.py` read it.
DRAFTED = "rlspec_drafted"
# Reasons of `why_refused`; `integrations/slime/refusals.py` gives some of them, too.
ATTENTION_RANKS = (
    "engines whose ranks attend to requests of their own were never run with a drafter on a GPU"
)
APART = "engines that prefill and decode apart were never run with a drafter that is trained or switched off"
MIXED_CHUNK = "batches that mix prefill and decode are not supported with speculation"
REJECTION = (
    "rejection sampling needs probabilities of a first draft, and rounds without drafts leave none"
)


@dataclass(frozen=True)
class Settings:
    """How the plugin acts in an engine. The names are those of the JSON in RLSPEC_SGLANG (docs/plugin.md)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    verifier: Verifier = "position_keyed"
    num_steps: int | None = None  # drafter passes of every round; None: a rule chooses
    off: bool = True  # whether a rule may choose to draft nothing; `hold` may in any case
    # Remember the fingerprints of what each push gave to the models' loaders, for the command `delivered`.
    deliveries: bool = False
    drafts: Drafts = "coupled"  # with the verifier position_keyed
    ragged: bool = False  # whether rounds may verify another number of drafts of each request
    sharpness: float = SHARPNESS[0]  # of coupled drafts, until a rule names one
    # Import SGLang's model files of these alone; (): all its files.
    architectures: tuple[str, ...] = ()
    loopback: bool = False  # torch's stores listen on the loopback address only

    @classmethod
    def from_environment(cls) -> Settings:
        """Return the settings in RLSPEC_SGLANG: JSON, or the defaults if it is 1, empty or not set.

        Raises ValueError, one line, for a setting that does not exist or has a wrong value.
        """
        return _parsed(os.environ.get(VARIABLE, ""))

    def to_environment(self) -> dict[str, str]:
        """Return the variable that `from_environment` reads in SGLang's processes."""
        return {VARIABLE: json.dumps(asdict(self))}


@cache  # read at every request; a process's variable does not change
def _parsed(text: str) -> Settings:
    """Return the settings in `text`, the value of RLSPEC_SGLANG. Raises ValueError."""
    if text in ("", "1"):
        return Settings()
    try:
        return TypeAdapter(Settings).validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or text
        names = ", ".join(field.name for field in fields(Settings))
        raise ValueError(
            f"{VARIABLE}: {place}: {wrong['msg']}; expected 1, or a JSON object of {names}"
        ) from None


def given_or_environment_key(given: str = "") -> str:
    """Return the API key given, or else that of the variable RLSPEC_API_KEY; "" if there is none."""
    return (given or os.environ.get(KEY, "")).strip()


def why_refused(server_args: Any) -> str:
    """Return why SGLang's options cannot be combined with adaptive speculation; "" if they can.

    `_REFUSED_WITH_DRAFTS` in `http/serve.py` has the same options for its command line.

    server_args  SGLang's parsed `ServerArgs`
    """
    if server_args.enable_mixed_chunk:
        return MIXED_CHUNK
    if server_args.disaggregation_mode != "null":
        return APART
    if server_args.speculative_use_rejection_sampling:
        return REJECTION
    # SGLang before 0.5.23 does not have this option.
    attention_ranks = getattr(server_args, "attn_dp_size", 1)
    if server_args.enable_dp_attention or max(server_args.dp_size, attention_ranks) > 1:
        return ATTENTION_RANKS
    return ""
