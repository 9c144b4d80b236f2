"""Schemas of the routes below /rlspec, and one plain sentence for each mistake in a body.

Types are strict: `true` is no integer, `2.0` is no integer, "2" is no number. Imports neither torch nor SGLang.

The limits protect the engine's process. docs/http-api.md documents the fields. `client/engine.py` and
`client/transport.py` write the bodies; `http/bodies.py`, `http/routes.py` and `http/weight_routes.py` have them checked
here.
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
    """A request that is not carried out: HTTP status and one sentence.

    The client treats 400 and 413 as faults of the request, which other engines would refuse, too (`MALFORMED` in
    `client/connection.py`). For other statuses it raises `RefusedError`.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Strict(BaseModel):
    """A body or query: an unknown field, another type, NaN and infinity are mistakes."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


Body = TypeVar("Body", bound=Strict)


def _top_k(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1, which keeps every token, or at least 1")
    return value


Text = Annotated[str, Field(min_length=1, max_length=256)]
RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7e]+$")]
# A version of the weights; the client reads it by int().
Version = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
# `check_batch` compares them with the vocabulary.
TokenIds = Annotated[list[int], Field(min_length=1, max_length=4 << 20)]
Edge = Annotated[int, Field(ge=0, le=1 << 40)]  # one dimension of a tensor's shape


class SamplingBody(Strict):
    """How a request's tokens are sampled; `types.Sampling` says what each field means.

    The names are those of SGLang's sampling parameters: `http/routes.py` passes the fields on.
    """

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
    """One sample to generate.

    input_ids  the prompt's tokens
    id         the client's own, distinct within a `GenerateBody`
    begun      tokens of the response that were sampled before; `max_new_tokens` counts them
    """

    id: RequestId
    input_ids: TokenIds
    begun: list[int] = Field([], max_length=4 << 20)
    sampling: SamplingBody = SamplingBody()


class GenerateBody(Strict):
    """Samples to generate. `progress`: also send the new tokens of unfinished samples now and then."""

    requests: list[RequestBody] = Field(min_length=1)
    progress: bool = False


class AbortBody(Strict):
    """The requests to abort; without `ids`, all of them."""

    ids: Annotated[list[Text], Field(max_length=1 << 16)] | None = None


class Nothing(Strict):
    """An empty body, or `{}`."""


class SetConfig(Strict):
    """The configuration of every later round. The scheduler checks it, by `types.SpecConfig.from_json`.

    sharpness  of coupled drafts (docs/losslessness.md); None: it stays
    """

    config: Any
    sharpness: float | None = None


class SetSpecRule(Strict):
    """The rule that chooses configurations. The scheduler checks it, by `speculation.rule.SpecRule.from_json`."""

    spec_rule: dict[str, Any]


class SetDraftVocabulary(Strict):
    """Ids of the tokens that drafts are chosen from, as many as at the start of the engine."""

    words: list[Annotated[int, Field(ge=0, le=1 << 24)]] = Field(min_length=1, max_length=1 << 24)


class Hold(Strict):
    """Why speculation is disabled until the command `release`."""

    reason: str = Field(min_length=1, max_length=4096)


# Commands of `scheduler/control.py` that clients may give by POST /rlspec/control/NAME, and the schema of each body. A
# field's name is the name of the command's parameter. `stamp` has no route: only `weight_routes.end` may run it.
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
    """A process group of the trainer, which is rank 0, and the tensor-parallel ranks of all engines.

    address, port  of the trainer's store
    size           ranks in the group
    first          this engine's first rank
    backend        of torch.distributed; the trainer's side has the same
    group          a new name. Its beginning is `GROUP_PREFIX` of `scheduler/protect.py`, which limits how long a
                   scheduler waits in such groups only
    """

    address: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:%-]+$")
    port: int = Field(ge=1, le=65535)
    size: int = Field(ge=2, le=4096)
    first: int = Field(1, ge=1, le=4095)
    group: str = Field(max_length=128, pattern=r"^rlspec-[A-Za-z0-9._-]+$")
    backend: Literal["nccl", "gloo"]


class TensorsBody(Strict):
    """Tensors that the trainer laid out in one piece: `push.bucket.Bucket.described`, and in the piece their bytes.

    One element a tensor in each list, in the order of the bytes. The schema does not compare the lists' lengths.
    `shapes` are full shapes, without tensor parallelism. `bucket_checks.check_described` checks names and shapes.
    """

    names: list[Text] = Field(min_length=1, max_length=1 << 16)
    dtypes: list[Literal["float64", "float32", "float16", "bfloat16"]] = Field(
        min_length=1, max_length=1 << 16
    )
    shapes: list[Annotated[list[Edge], Field(max_length=8)]] = Field(
        min_length=1, max_length=1 << 16
    )


class ReceiveBody(TensorsBody):
    """Tensors that the trainer broadcasts in the group that `JoinBody` named."""

    group: Text


class HandleBody(TensorsBody):
    """Tensors in the trainer's memory on a GPU.

    handle  64 bytes in base64, which `gpu_memory.copy_from_handle` opens
    """

    handle: str = Field(pattern=r"^[A-Za-z0-9+/]{86}==$")


def parse(model: type[Body], body: bytes) -> Body:
    """Read a JSON body as `model`; an empty body counts as `{}`. Raises Refusal."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise Refusal(400, sentence(error)) from None


def parse_query(model: type[Body], query: Mapping[str, str]) -> Body:
    """Read a query string as `model`. Raises Refusal.

    model  with fields of text only: a query has no numbers, and types are strict
    """
    try:
        return model.model_validate(dict(query))
    except ValidationError as error:
        raise Refusal(400, "query: " + sentence(error)) from None


def check_batch(body: GenerateBody, vocabulary: int, context: int, reserved: int = 0) -> None:
    """Raise Refusal for token ids outside the vocabulary, samples that are too long, and request ids that come twice.

    vocabulary  number of token ids
    context     longest prompt and response together, in tokens
    reserved    tokens of that context that SGLang keeps for drafts
    """
    ids: set[str] = set()
    for i, request in enumerate(body.requests):
        _check_tokens(f"requests[{i}].input_ids", request.input_ids, vocabulary)
        _check_tokens(f"requests[{i}].begun", request.begun, vocabulary)
        prompt = len(request.input_ids)
        most_new = request.sampling.max_new_tokens  # counts `begun`, so that is not added below
        if prompt >= context:
            raise Refusal(
                400,
                f"request {request.id}: {prompt} prompt tokens; expected fewer than the model's context of {context}",
            )
        if prompt + most_new > context - reserved:
            less = f" less {reserved} for drafts" if reserved else ""
            raise Refusal(
                400,
                f"request {request.id}: {prompt} prompt tokens and max_new_tokens={most_new} make {prompt + most_new}; "
                f"expected at most the model's context of {context}{less}",
            )
        if request.id in ids:
            raise Refusal(
                400, f"id {shown(request.id)} is given to two requests; expected distinct ids"
            )
        ids.add(request.id)


def _check_tokens(place: str, tokens: list[int], vocabulary: int) -> None:
    """Raise Refusal for the first token id out of range; `place` names the list in its sentence."""
    # Faster than the loop below, and enough for a list without a mistake.
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
    """Format a name as JSON does, without its quotes: ASCII on one line, at most 200 characters."""
    return json.dumps(name)[1:-1][:200]
