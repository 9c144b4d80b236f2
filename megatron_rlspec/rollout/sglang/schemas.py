"""Schemas of the routes below /rlspec, and one plain sentence for each mistake in a body.

Types are strict: `true` is no integer, `2.0` is no integer, "2" is no number. Imports neither torch nor SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megatron_rlspec.config.base import expectation
from megatron_rlspec.types import Scope

SHOWN_CHARACTERS = 60  # of a wrong value, in a sentence


class Refusal(ValueError):
    """A request that is not carried out: HTTP status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


Body = TypeVar("Body", bound=Strict)


def _top_k(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1, which keeps every token, or at least 1")
    return value


Text = Annotated[str, Field(min_length=1, max_length=256)]
RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7e]+$")]
Version = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
TokenIds = Annotated[list[int], Field(min_length=1, max_length=4 << 20)]
Edge = Annotated[int, Field(ge=0, le=1 << 40)]


class SamplingBody(Strict):
    """How a request's tokens are sampled; `types.Sampling` says what each field means."""

    temperature: float = Field(1.0, ge=0, le=1000)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1), AfterValidator(_top_k)] = -1
    min_p: float = Field(0.0, ge=0, le=1)
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field([], max_length=32)
    max_new_tokens: int = Field(1024, ge=1, le=1 << 24)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=(1 << 31) - 1)]] = Field([], max_length=1024)
    ignore_eos: bool = False
    sampling_seed: int = Field(0, ge=0, le=(1 << 63) - 1)


class RequestBody(Strict):
    """One sample to generate. `begun`: response tokens from before; `max_new_tokens` counts them."""

    id: RequestId
    input_ids: TokenIds
    begun: list[int] = Field([], max_length=4 << 20)
    sampling: SamplingBody = SamplingBody()


class GenerateBody(Strict):
    """`progress`: also send the tokens of samples that are being generated."""

    requests: list[RequestBody] = Field(min_length=1)
    progress: bool = False


class AbortBody(Strict):
    """The requests to abort; without `ids`, all of them."""

    ids: Annotated[list[Text], Field(max_length=1 << 16)] | None = None


class Nothing(Strict):
    """An empty body, or `{}`."""


class SetConfig(Strict):
    """`types.SpecConfig.from_json`, which the scheduler calls, checks the configuration."""

    config: Any
    sharpness: float | None = None


class SetSpecRule(Strict):
    """`speculation.rule.SpecRule.from_json`, which the scheduler calls, checks what is in it."""

    spec_rule: dict[str, Any]


class SetDraftVocabulary(Strict):
    """Ids of the tokens that drafts are chosen from, as many as at the start of the engine."""

    words: list[Annotated[int, Field(ge=0, le=1 << 24)]] = Field(min_length=1, max_length=1 << 24)


class Hold(Strict):
    reason: str = Field(min_length=1, max_length=4096)


COMMANDS: dict[str, type[Strict]] = {
    "describe": Nothing,
    "set_config": SetConfig,
    "set_spec_rule": SetSpecRule,
    "set_draft_vocabulary": SetDraftVocabulary,
    "hold": Hold,
    "release": Nothing,
    "spec_rule_report": Nothing,
    "stats": Nothing,
    "progress": Nothing,
    "recent_rounds": Nothing,
    "fingerprints": Nothing,
    "delivered": Nothing,
    "shapes": Nothing,
}


class BeginQuery(Strict):
    """Which tensors an update has, and the version of the weights after it."""

    scope: Scope
    version: Version


class SessionQuery(Strict):
    """The update that a request belongs to, by the token that `begin` returned."""

    session: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class JoinBody(Strict):
    """A process group of the trainer, rank 0, and the ranks of engines; this engine's begin at `first`."""

    address: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:%-]+$")
    port: int = Field(ge=1, le=65535)
    size: int = Field(ge=2, le=4096)
    first: int = Field(1, ge=1, le=4095)
    group: str = Field(max_length=128, pattern=r"^rlspec-[A-Za-z0-9._-]+$")
    backend: Literal["nccl", "gloo"]


class TensorsBody(Strict):
    """Tensors that the trainer laid out in one piece: their bytes, one after the other."""

    names: list[Text] = Field(min_length=1, max_length=1 << 16)
    dtypes: list[Literal["float64", "float32", "float16", "bfloat16"]] = Field(
        min_length=1, max_length=1 << 16
    )
    shapes: list[Annotated[list[Edge], Field(max_length=8)]] = Field(
        min_length=1, max_length=1 << 16
    )


class ReceiveBody(TensorsBody):
    """Tensors that the trainer broadcasts."""

    group: Text


class HandleBody(TensorsBody):
    """Tensors in the trainer's memory on a GPU (`gpu_memory.py`): 64 bytes in base64."""

    handle: str = Field(pattern=r"^[A-Za-z0-9+/]{86}==$")


def parse(model: type[Body], body: bytes) -> Body:
    """Read a JSON body as `model`; an empty body counts as `{}`. Raises Refusal."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise Refusal(400, sentence(error)) from None


def parse_query(model: type[Body], query: Mapping[str, str]) -> Body:
    """Read a query string as `model`. Raises Refusal."""
    try:
        return model.model_validate(dict(query))
    except ValidationError as error:
        raise Refusal(400, "query: " + sentence(error)) from None


def check_batch(body: GenerateBody, vocabulary: int, context: int, reserved: int = 0) -> None:
    """Refuse token ids outside the vocabulary, prompts that are too long, and ids that come twice.

    reserved  tokens of the model's context that SGLang keeps for drafts
    """
    ids: set[str] = set()
    for i, request in enumerate(body.requests):
        _check_tokens(f"requests[{i}].input_ids", request.input_ids, vocabulary)
        _check_tokens(f"requests[{i}].begun", request.begun, vocabulary)
        prompt = len(request.input_ids)
        longest = request.sampling.max_new_tokens
        if prompt >= context:
            raise Refusal(
                400,
                f"request {request.id}: {prompt} prompt tokens; expected fewer than the model's context of {context}",
            )
        if prompt + longest > context - reserved:
            less = f" less {reserved} for drafts" if reserved else ""
            raise Refusal(
                400,
                f"request {request.id}: {prompt} prompt tokens and max_new_tokens={longest} make {prompt + longest}; "
                f"expected at most the model's context of {context}{less}",
            )
        if request.id in ids:
            raise Refusal(
                400, f"id {shown(request.id)} is given to two requests; expected distinct ids"
            )
        ids.add(request.id)


def _check_tokens(place: str, tokens: list[int], vocabulary: int) -> None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary):
        return
    for i, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise Refusal(
                400,
                f"{place}[{i}] is {shown(token)}; expected a token id from 0 to {vocabulary - 1}",
            )


def sentence(error: ValidationError) -> str:
    """Format the first mistake of a body: place, value, what was expected."""
    first = error.errors(include_url=False)[0]
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{plain(part)}"
    place = place.removeprefix(".") or "the body"
    if first["type"] == "json_invalid":
        return "the body is not JSON; expected a JSON object in UTF-8"
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "extra_forbidden":
        return f"{place} is not known"
    return f"{place} is {shown(first['input'])}; {expectation(first)}"


def shown(value: Any) -> str:
    """Format a value as JSON, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def plain(name: str) -> str:
    """Format a name without quotes. Characters that are not printable ASCII are escaped; a long name is cut."""
    return json.dumps(name)[1:-1][:200]
