"""One SGLang engine behind `rlspec serve`, as a `RolloutEngine`. Imports no sglang: it speaks HTTP.

The protocol in `megatron_rlspec/engine.py` says what each method means. The other side is `http/routes.py` and
`http/weight_routes.py`; `connection.py` sends the requests. Every method that sends one raises EngineError if the
engine refuses, fails or is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self, cast

import numpy as np

from megatron_rlspec.engine import EngineDescription, EngineError, RequestError
from megatron_rlspec.push.bucket import Bucket, Memory
from megatron_rlspec.push.fingerprint import as_delivered
from megatron_rlspec.push.update import update_weights
from megatron_rlspec.rollout.sglang.client.connection import MALFORMED, Connection
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess
from megatron_rlspec.rollout.sglang.client.transport import Http, Transport
from megatron_rlspec.rollout.sglang.settings import given_or_environment_key
from megatron_rlspec.speculation.acceptance import delivered, pooled, runs_of_ones
from megatron_rlspec.speculation.round_log import Round
from megatron_rlspec.types import (
    Load,
    Partial,
    Request,
    RoundStats,
    RunningSample,
    Sample,
    Sampling,
    Scope,
    SpecConfig,
    Status,
)

# SGLang's `finish_reason` -> the status of a sample
_STATUS: dict[str, Status] = {"stop": "finished", "length": "truncated", "abort": "aborted"}
logger = logging.getLogger(__name__)


class SGLangEngine(Connection):
    """The client of one `rlspec serve`. Several threads may call it.

    url        of the running server
    api_key    by default that of the environment variable RLSPEC_API_KEY
    process    the server's process, if this client started it and must end it
    timeout    longest time in seconds without an answer, or without a line about any sample
    transport  that sends weights (`transport.py`), shared by all engines of a run; by default in the bodies of requests
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        process: EngineProcess | None = None,
        timeout: float = 1800.0,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(url, given_or_environment_key(api_key), timeout, process)
        self._transport = transport or Http()
        # Why the weights are not usable, so that `generate` refuses; "" if they are. The server has a check of its own
        # (`http/update.py`), which knows nothing of `sleep`.
        self._broken = ""
        # The answer of the command `shapes`; None until `_served_tensors` has asked.
        self._served: dict[str, Any] | None = None
        self._update = ""  # the token of the open weight update; "" without one

    @classmethod
    def of(
        cls, process: EngineProcess, *, timeout: float = 1800.0, transport: Transport | None = None
    ) -> Self:
        """Return the client of an engine that `launcher.launch` started; `close` then ends the engine."""
        return cls(
            process.url,
            api_key=process.api_key,
            process=process,
            timeout=timeout,
            transport=transport,
        )

    @property
    def bucket_memory(self) -> Memory:
        """Return the memory of the buckets that `send` takes."""
        return self._transport.memory

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        """Generate one sample per request and return them in order. Calls `on_sample` with each finished sample.

        The requests' ids must be distinct. `on_sample` runs in this thread, between two lines of the answer; aborted
        samples come there, too. Raises EngineError, whose `begun` has, by request id, what the unfinished samples had,
        so that another engine can continue them.
        """
        if self._broken:
            raise EngineError(
                f"{self.url}: serves nothing since a failed weight update: {self._broken}"
            )
        if not requests:
            return []
        by_id = {r.id: r for r in requests}
        body = {"requests": [_body(r, sampling) for r in requests], "progress": True}
        samples: dict[str, Sample] = {}
        # By id, the lines of progress so far as one line (`_with_progress`).
        begun: dict[str, dict[str, Any]] = {}
        try:
            for line in self.stream("generate", json=body):
                if "error" in line:
                    place = f"request {line['id']}" if "id" in line else "generate"
                    kind = RequestError if line.get("status") in MALFORMED else EngineError
                    raise kind(f"{self.url}: {place}: {line['error']}")
                with self.reading("generate", line):
                    request = by_id[line["id"]]
                    # A line of progress, and not the last line of the sample.
                    if "drawn" in line:
                        begun[request.id] = _with_progress(begun.get(request.id), line)
                        continue
                    sample = samples[request.id] = _sample(request, line)
                if on_sample:
                    on_sample(sample)
            if len(samples) != len(requests):
                raise EngineError(f"{self.url}: {len(requests)} samples asked, {len(samples)} came")
        except EngineError as error:
            unfinished = {}
            for name in begun.keys() - samples.keys():
                # Where marks and rounds contradict each other, the sample begins anew: it is left out.
                with suppress(KeyError, TypeError, ValueError):
                    unfinished[name] = Partial.of(_sample(by_id[name], begun[name]))
            error.begun = unfinished
            raise
        return [samples[r.id] for r in requests]

    def begin_update(self, version: int, scope: Scope = "all") -> None:
        """Open an update. One that another client left open ends unfinished."""
        # Before the request: an engine whose update does not reach its end must not generate, even if no answer comes.
        self._broken = self._broken or f"version {version} was not completed"
        query = {"scope": scope, "version": str(version)}
        with self.answer_to("weights/begin", params=query) as answer:
            self._update = answer["session"]

    def send(self, bucket: Bucket, *others: SGLangEngine) -> None:
        """Send a bucket of `bucket_memory` between `begin_update` and `end_update`.

        others  engines with the same joint transport (`GroupBroadcast`) and open updates; this call serves them, too
        """
        posts = [engine._in_update for engine in (self, *others)]
        self._transport.send(posts, bucket)

    def end_update(self, error: str = "") -> None:
        """End the update; with `error`, unfinished. Running samples continue under the new weights, recomputed."""
        self._broken = error or self._broken
        if not error:
            self._in_update("weights/end")
            self._broken = ""  # only now: the engine may refuse the end
        elif self._update:  # "" if `begin_update` failed: nothing is open
            self._in_update("weights/abandon")
        self._update = ""

    update_weights = update_weights  # the function of `push/update.py`, as a method

    def _in_update(self, path: str, **arguments: Any) -> dict[str, Any]:
        """Post a request. Paths below weights/ get the query that names the open update.

        Transports get this bound method for each engine. It equals itself from push to push, by which `GroupBroadcast`
        knows whether its engines are still the same.
        """
        # Transports also post control/describe, which takes no query.
        if path.startswith("weights/"):
            arguments["params"] = {"session": self._update}
        return self.post(path, **arguments)

    def set_config(self, config: SpecConfig, sharpness: float | None = None) -> None:
        """Run this configuration in every later decode round, and end the use of a rule.

        sharpness  of coupled drafts; None: it stays
        """
        body = {"config": config.to_json(), "sharpness": sharpness}
        self.post("control/set_config", json=body)

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None:
        """Choose configurations by `SpecRule.from_json(rule)`. Without `candidates` the engine uses its own."""
        self.post("control/set_spec_rule", json={"spec_rule": dict(rule)})

    def set_draft_vocabulary(self, words: np.ndarray) -> None:
        """Choose drafts from the token ids `words`, as many as `rlspec serve --draft-vocabulary` was given."""
        self.post("control/set_draft_vocabulary", json={"words": words.tolist()})

    def spec_rule_report(self) -> dict[str, Any]:
        """Return `SpecRule.report` of the engine's rule since the last call; empty without speculation."""
        with self.answer_to("control/spec_rule_report") as answer:
            return dict(answer["report"])

    def hold(self, reason: str) -> None:
        """Disable speculation until `release`. Rules set before that are stored. `describe()["held"]` is the reason."""
        self.post("control/hold", json={"reason": reason})

    def release(self) -> None:
        self.post("control/release")

    def sleep(self) -> None:
        """Pause, and have SGLang release weights and KV cache. On a CPU it only drops the cached prefixes."""
        self._broken = self._broken or "it slept, and no weights were pushed since"
        # The pause comes first: SGLang releases memory only when nothing runs. "retract" takes the running samples off
        # the batch.
        self.post_to_sglang("pause_generation", {"mode": "retract"})
        self.post_to_sglang("release_memory_occupation", {})

    def wake(self) -> None:
        """Take the memory back. The engine stays paused until an update.

        That must have the scope "all", because on a GPU all weights were lost. Neither this class nor the server checks
        it: `run/engines.py` has the pusher forget what the engine held.
        """
        self.post_to_sglang("resume_memory_occupation", {})

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the named samples, or all for None: their `generate` returns what they have, with status "aborted"."""
        self.post("abort", json={} if request_ids is None else {"ids": list(request_ids)})

    def progress(self) -> Load:
        """Return what the engine decodes now, what waits, and the free room of its KV cache.

        The `prompt` of a sample that was continued includes the response tokens that it had before.
        """
        with self.answer_to("control/progress") as answer:
            # Rows of four, in the order of the fields (`_progress` in `scheduler/control.py`).
            running = tuple(RunningSample(*row) for row in answer["running"])
            version = int(answer["version"])
            return Load(self.url, running, answer["waiting"], answer["free_tokens"], version)

    def stats(self) -> list[RoundStats]:
        """Return and reset the counts and times of decode rounds, summed by (config, batch)."""
        stats = []
        with self.answer_to("control/stats") as answer:
            for fields in answer["rounds"]:  # `RoundStats` as JSON objects: tuples came as lists
                fields["config"] = SpecConfig(**fields["config"])
                for histogram in ("accepted", "if_all"):
                    fields[histogram] = tuple(fields[histogram])
                stats.append(RoundStats(**fields))
        return stats

    def recent_rounds(self) -> list[Round]:
        """Return and reset the latest decode rounds, in order.

        Each is (config, batch, context tokens, ms); ms is None after a break.
        """
        with self.answer_to("control/recent_rounds") as answer:
            return [(SpecConfig(**config), *rest) for config, *rest in answer["rounds"]]

    def fingerprints(self) -> dict[str, int]:
        """Return the fingerprints of the tensors that the engine holds, by name.

        An engine that cannot name its tensors returns those of the tensors that its loaders were given.
        """
        tensors = self._served_tensors()
        if tensors["unnamed"]:
            with self.answer_to("control/delivered") as answer:
                return as_delivered(answer, tensors["drafter"].__contains__)
        with self.answer_to("control/fingerprints") as answer:
            return dict(answer["fingerprints"])

    def _served_tensors(self) -> dict[str, Any]:
        """Return the answer of the command `shapes`, asked once: names and shapes of an engine never change.

        `shapes`: shape by name; `drafter`: the set of the drafter's names; `unnamed`: why there are no shapes, or "".
        """
        if self._served is None:
            with self.answer_to("control/shapes") as answer:
                unnamed = answer["unnamed"]
                self._served = {**answer, "drafter": set(answer["drafter"])}
            if unnamed:
                logger.warning(
                    "%s: pushes are checked by what its loaders were given: %s", self.url, unnamed
                )
        return self._served

    def describe(self) -> EngineDescription:
        """Describe the engine. Raises RefusedError if the server is not `rlspec serve`.

        The answer also has `sglang`, its version, `controller`, the class that switches configurations, and
        `nccl_cumem_enable`, the engine's value of NCCL_CUMEM_ENABLE.
        """
        answer = self.post("control/describe")
        if "verifier" not in answer:
            raise self.not_an_engine("control/describe", answer)
        return cast(EngineDescription, answer)

    @property
    def alive(self) -> bool:
        """Return False if this client started the server's process and it has ended. It asks no server."""
        return self._process is None or not self._process.ended

    def close(self) -> None:
        """End the server if `process` was given; otherwise do nothing. Repeatable."""
        if self._process is not None:
            self._process.close()


def _body(request: Request, sampling: Sampling) -> dict[str, Any]:
    """Return a request as `schemas.RequestBody`. The fields of `Sampling` have the names of `SamplingBody`."""
    body = {
        "id": request.id,
        "input_ids": np.asarray(request.prompt.tokens).tolist(),
        "sampling": {**asdict(sampling), "sampling_seed": request.seed},
    }
    if request.partial is not None:
        body["begun"] = request.partial.response.tolist()
    return body


def _with_progress(before: dict[str, Any] | None, line: dict[str, Any]) -> dict[str, Any]:
    """Return the last line, as `_sample` reads it, that the sample would have if it was aborted after this progress.

    before  what this returned for the progress before, changed in place; None for the first
    line    of progress (`http/progress.py`); its tokens are those since the line before
    """
    sample: dict[str, Any] = before or {
        "output_ids": [],
        "logprobs": [],
        "drafted": [],
        "finish": {"type": "abort"},
    }
    new = line["drawn"]
    for field in ("output_ids", "logprobs", "drafted"):
        sample[field] += new[field]
    sample["accepted"] = [line["rounds"]]  # so far; `_sample` needs only the sum of this histogram
    # The server sends progress only while the weights are those with which the sample began.
    sample["weight_versions"] = [
        {"version": line["version"], "start": 0, "end": len(sample["output_ids"])}
    ]
    return sample


def _sample(request: Request, line: dict[str, Any]) -> Sample:
    """Return the sample that its last line describes, behind the tokens of `request.partial`.

    Raises KeyError, TypeError or ValueError for a line that is not as `routes._generated_lines` writes it.
    """
    response = np.asarray(line["output_ids"], dtype=np.int64)
    logprobs = np.asarray(line["logprobs"], dtype=np.float32)
    spans = tuple((int(s["version"]), s["start"], s["end"]) for s in line["weight_versions"])
    # SGLang may mark tokens past the end of the response. Its histogram counts them, too, so only its sum is used: the
    # number of verify rounds.
    drafted = tuple(runs_of_ones(line["drafted"][: len(response)]))
    accepted = delivered(sum(line["accepted"]), drafted, len(response))
    begun = request.partial
    if begun is not None:
        first = len(begun.response)  # position of the line's first token in the whole response
        response = np.concatenate([begun.response, response])
        logprobs = np.concatenate([begun.logprobs, logprobs])
        spans = begun.versions_with(spans)
        drafted = (*begun.accepted_spans, *((a + first, b + first) for a, b in drafted))
        accepted = tuple(pooled([begun.accepted, accepted]).tolist())
    status = _STATUS[line["finish"]["type"]]
    return request.sample(
        status, response, logprobs, policy_versions=spans, accepted=accepted, accepted_spans=drafted
    )
