"""Schemas of the routes below /rlspec, and one plain sentence for each mistake in a body.

Types are strict: `true` is no integer, `2.0` is no integer, "2" is no number. Imports neither torch nor SGLang.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from megatron_rlspec.config.base import expectation
from megatron_rlspec.rollout.sglang import limits
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SHARPNESS, Scope

SHOWN_CHARACTERS = 60  # of a wrong value, in a sentence


class Refusal(ValueError):
    """A request that is not carried out: HTTP status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Strict(BaseModel):
    """`limit`: bytes that such a body may have. `rows`: its field that is a list of `row`, which may be long."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    limit: ClassVar[int] = limits.JSON_BYTES
    rows: ClassVar[str] = ""
    row: ClassVar[type[Strict]]


Body = TypeVar("Body", bound=Strict)


def _top_k(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1, which keeps every token, or at least 1")
    return value


def _path_or_object(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("expected a path or an object")
    return value


Text = Annotated[str, Field(min_length=1, max_length=256)]
RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7e]+$")]
Version = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
TokenIds = Annotated[list[int], Field(min_length=1, max_length=4 << 20)]
Edge = Annotated[int, Field(ge=0, le=1 << 40)]
Config = Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=3, max_length=3)]
Share = Annotated[float, Field(ge=0, lt=1)]


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

    limit: ClassVar[int] = limits.BATCH_BYTES
    rows: ClassVar[str] = "requests"
    row: ClassVar[type[Strict]] = RequestBody
    requests: list[RequestBody] = Field(min_length=1, max_length=limits.REQUESTS)
    progress: bool = False


class AbortBody(Strict):
    """The requests to abort; without `ids`, all of them."""

    ids: Annotated[list[Text], Field(max_length=1 << 16)] | None = None


class Nothing(Strict):
    """An empty body, or `{}`."""


class ScheduleBody(Strict):
    """`types.SpecSchedule`; a configuration is [num_steps, topk, num_draft_tokens]."""

    batch_edges: list[Edge] = Field(min_length=1, max_length=4096)
    context_edges: list[Edge] = Field(min_length=1, max_length=4096)
    configs: list[list[Config]] = Field(min_length=1, max_length=4096)


class SetSchedule(Strict):
    schedule: ScheduleBody


_ROOFLINE: dict[str, Any] = {
    field.name: (
        Annotated[float, Field(ge=0)],
        ... if field.default is dataclasses.MISSING else field.default,
    )
    for field in dataclasses.fields(Roofline)
}
RooflineBody = create_model("RooflineBody", __base__=Strict, **_ROOFLINE)


class TimesBody(Strict):
    """`speculation.round_times.RoundTimes.to_json`."""

    timings: list[int]
    comparisons: int
    noise: float = Field(gt=0)
    octaves: dict[str, tuple[list[float], list[list[float]]]]


class TrialsBody(Strict):
    """What trials of a rule may lose, and when the next one may come."""

    allowance: float
    interval: int = Field(ge=1)
    wait: int


class LearntBody(Strict):
    """What a rule has learnt of its engine's rounds (`SpecRule.report`)."""

    candidates: list[Config]
    times: TimesBody
    trials: TrialsBody


class AcceptanceBody(Strict):
    """`speculation.acceptance.Acceptance`: what was observed of each depth."""

    depth: int = Field(ge=1, le=4096)
    hits: list[float]
    draws: list[float]
    ratio_hits: list[float]
    ratio_base: list[float]


class SpecRuleBody(Strict):
    """`speculation.rule.SpecRule.from_json`; the scheduler checks what depends on the engine."""

    candidates: list[Config] = Field([], max_length=256)
    acceptance: AcceptanceBody | None = None
    forecast: list[float] | None = None
    # factor on log q of coupled drafts; omitted: as it is
    sharpness: float = Field(SHARPNESS[0], gt=0, le=100)
    table: Annotated[Any, AfterValidator(_path_or_object)] = ""
    roofline: RooflineBody | None = None  # type: ignore[valid-type]
    learnt: LearntBody | None = None
    schedule: ScheduleBody | None = None
    tp: int = Field(1, ge=1, le=4096)
    learn: bool = True
    stock: bool = False


class SetSpecRule(Strict):
    spec_rule: SpecRuleBody


class SetDraftVocabulary(Strict):
    """Ids of the tokens that drafts are chosen from, as many as at the start of the engine."""

    limit: ClassVar[int] = limits.BATCH_BYTES
    words: list[Annotated[int, Field(ge=0, le=1 << 24)]] = Field(min_length=1, max_length=1 << 24)


class Hold(Strict):
    reason: str = Field(min_length=1, max_length=4096)


COMMANDS: dict[str, type[Strict]] = {
    "describe": Nothing,
    "set_schedule": SetSchedule,
    "set_spec_rule": SetSpecRule,
    "set_draft_vocabulary": SetDraftVocabulary,
    "hold": Hold,
    "release": Nothing,
    "spec_rule_report": Nothing,
    "stats": Nothing,
    "not_begun": Nothing,
    "progress": Nothing,
    "recent_rounds": Nothing,
    "fingerprints": Nothing,
    "delivered": Nothing,
    "shapes": Nothing,
}


class BeginQuery(Strict):
    """Which tensors an update has, and the version of the weights after it.

    `hold`: the answer stays open as long as the update, which ends unfinished if its client closes the connection.
    """

    scope: Scope
    version: Version
    hold: Literal["true", "false"] = "false"


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
    if model.rows and len(body) > limits.REQUEST_BYTES:
        return _in_pieces(model, body)
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise Refusal(400, sentence(error)) from None


def _in_pieces(model: type[Body], body: bytes) -> Body:
    """Read a long body row by row. pydantic keeps other threads waiting while it reads a piece."""
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        pieces = msgspec.json.decode(found.pop(model.rows, b"null"), type=list[msgspec.Raw])
        rest = msgspec.json.decode(msgspec.json.encode(found))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal(
            400, f"the body is not a JSON object in UTF-8 with a list {model.rows}"
        ) from None
    if len(pieces) > limits.REQUESTS:
        raise Refusal(400, f"{model.rows}: expected at most {limits.REQUESTS} entries")
    rows = []
    for i, piece in enumerate(pieces):
        place = f"{model.rows}[{i}]"
        text = bytes(piece)
        if len(text) > limits.REQUEST_BYTES:
            raise Refusal(
                413, f"{place} has {len(text)} bytes; expected at most {limits.REQUEST_BYTES}"
            )
        try:
            rows.append(model.row.model_validate_json(text))
        except ValidationError as error:
            raise Refusal(400, sentence(error, (model.rows, i))) from None
    try:
        return model.model_validate({**rest, model.rows: rows})
    except ValidationError as error:
        raise Refusal(400, sentence(error)) from None


def parse_query(model: type[Body], query: Sequence[tuple[str, str]]) -> Body:
    """Read a query string's (name, value) pairs as `model`. Raises Refusal."""
    found: dict[str, str] = {}
    for name, value in query:
        if name in found:
            raise Refusal(400, f"query: {shown(name)} is given more than once; expected once")
        found[name] = value
    try:
        return model.model_validate(found)
    except ValidationError as error:
        raise Refusal(400, "query: " + sentence(error)) from None


def check_batch(body: GenerateBody, vocabulary: int, context: int, reserved: int = 0) -> None:
    """Refuse token ids outside the vocabulary, prompts that are too long, and ids that come twice.

    reserved  tokens of the model's context that SGLang keeps for drafts
    """
    for i, request in enumerate(body.requests):
        ids = request.input_ids
        for name, tokens in (("input_ids", ids), ("begun", request.begun)):
            if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
                j = next(j for j, token in enumerate(tokens) if not 0 <= token < vocabulary)
                place = f"requests[{i}].{name}[{j}]"
                raise Refusal(
                    400,
                    f"{place} is {shown(tokens[j])}; expected a token id from 0 to {vocabulary - 1}",
                )
        if len(ids) >= context:
            raise Refusal(
                400,
                f"request {request.id}: {len(ids)} prompt tokens; expected fewer than the model's context of {context}",
            )
        asked = len(ids) + request.sampling.max_new_tokens
        if asked > context - reserved:
            less = f" less {reserved} for drafts" if reserved else ""
            raise Refusal(
                400,
                f"request {request.id}: {len(ids)} prompt tokens and max_new_tokens={request.sampling.max_new_tokens} "
                f"make {asked}; expected at most the model's context of {context}{less}",
            )
    names = sorted(request.id for request in body.requests)
    for before, after in zip(names, names[1:], strict=False):
        if before == after:
            raise Refusal(
                400, f"id {shown(before)} is given to two requests; expected distinct ids"
            )


def sentence(error: ValidationError, within: Sequence[int | str] = ()) -> str:
    """Format the first mistake of a body, or of the part `within` it: place, value, what was expected."""
    first = error.errors(include_url=False)[0]
    path = (
        f"[{part}]" if isinstance(part, int) else f".{plain(part)}"
        for part in (*within, *first["loc"])
    )
    place = "".join(path).removeprefix(".") or "the body"
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
