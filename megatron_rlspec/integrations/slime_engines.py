"""slime's engines under contract: what is asked of them after each push, and what they are told after each rollout.

    after_push(urls, sent, version, is_drafter, push_again) -> PushHealth      on the trainer's rank 0
    Speculation(adapter).after_rollout(urls) -> metrics                        where rollouts are driven; and, where
    Speculation(adapter).before_rollout(prediction) -> metrics                 training predicts, before each

`urls` are those of plain `sglang.launch_server` processes in which the plugin is in force (`RLSPEC_SGLANG` set): it
adds the routes that are asked here. `sent` are the fingerprints of every tensor of one push, by their names in the
checkpoint. No slime, no Ray and no Megatron in here: `slime_push.py` and `slime_metrics.py` call it from slime's
own classes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import requests

from megatron_rlspec.mtp.predict import Forecast, Prediction
from megatron_rlspec.rollout.engine import EngineError
from megatron_rlspec.rollout.sglang.client import RefusedError, SGLangEngine
from megatron_rlspec.spec.acceptance import Acceptance
from megatron_rlspec.spec.adapt import Adapter
from megatron_rlspec.spec.cost_table import CostTable
from megatron_rlspec.types import RoundStats, SpecConfig
from megatron_rlspec.weights.detectors import Action, Drift, Finding, HealthSettings, decide
from megatron_rlspec.weights.fingerprint import compare
from megatron_rlspec.weights.health import HealthError
from megatron_rlspec.weights.names import family_of

logger = logging.getLogger(__name__)
Marks = Mapping[str, int]  # a tensor's name in the checkpoint -> its fingerprint
_SECONDS = 600.0


class Engine(SGLangEngine):
    """The client of an engine that slime pushes to."""

    def __init__(self, url: str, api_key: str = "") -> None:
        super().__init__(url, api_key=api_key, timeout=_SECONDS)

    def version(self) -> str:
        """The weight version that SGLang names. Raises EngineError."""
        return str(self._own("GET", "model_info").json()["weight_version"])

    def begin_update(self) -> None:
        """Open the session in which SGLang takes weights from 0.5.23 on, and which slime does not open."""
        answer = self._own("POST", "begin_weight_update", 400, 404)
        if answer.status_code == 400:  # left open by an update that failed
            self.end_update()
            self._own("POST", "begin_weight_update")

    def end_update(self) -> None:
        self._own("POST", "end_weight_update", 404)

    def _own(self, method: str, path: str, *allowed: int) -> requests.Response:
        """A route of SGLang's own. Raises EngineError for a status that is neither 200 nor allowed."""
        with requests.Session() as session:
            session.trust_env = False
            body = {"json": {}} if method == "POST" else {}
            try:
                answer = session.request(method, f"{self.url}/{path}", headers=self._headers, timeout=_SECONDS, **body)
            except requests.RequestException as error:
                raise EngineError(f"{self.url}: {path} failed: {error}") from None
        if answer.status_code not in (200, *allowed):
            raise EngineError(f"{self.url}: {path} refused ({answer.status_code}): {answer.text[:500]}")
        return answer


@dataclass(frozen=True)
class PushHealth:
    """What became of each engine, by URL. `unchecked`: engines that cannot tell what they hold, and why not."""

    actions: Mapping[str, Action]
    records: tuple[dict[str, Any], ...]
    unchecked: Mapping[str, str]

    def metrics(self) -> dict[str, float]:
        return {
            "health/incidents": float(len(self.records)),
            "health/plain_engines": float(sum(action == "plain" for action in self.actions.values())),
            "health/unchecked_engines": float(len(self.unchecked)),
        }


def after_push(
    urls: Sequence[str],
    sent: Marks,
    version: int,
    is_drafter: Callable[[str], bool],
    push_again: Callable[[], Marks] | None = None,
    api_key: str = "",
) -> PushHealth:
    """Every engine must name `version` and hold exactly what was `sent`; one that does not is pushed to once more.

    `push_again` pushes everything to all engines, under the same version, and returns what it sent; None where nobody
    can. Until it has helped, the engine's speculation is held off; if it does not help and only the drafter is in
    doubt, it stays so until a later push does. Raises HealthError, in one line with engines and tensors, where a
    target is in doubt: no such engine may draw what is trained on.
    """
    engines = {url: Engine(url, api_key) for url in urls}
    unchecked: dict[str, str] = {}
    first = _examine(engines, sent, version, is_drafter, unchecked)
    doubted = [url for url, findings in first.items() if decide(findings, None) == "push_again"]
    second: dict[str, list[Finding]] = {}
    if doubted:
        for url in doubted:
            _hold(engines[url], first[url])
        if push_again is not None:
            sent = push_again()
            second = _examine(engines, sent, version, is_drafter, unchecked)
        else:
            second = first
    # An engine that was healthy was pushed to as well, and is judged by what it holds now.
    asked_twice = {url for url in urls if url in doubted or second.get(url)}
    actions = {url: decide(first[url] or second.get(url, ()), second.get(url)) for url in urls}
    records = tuple(_record(url, version, first[url], second[url], actions[url]) for url in urls if url in asked_twice)
    for record in records:
        logger.error("rlspec: %s", told(record))
    dropped = [record for record in records if record["action"] == "drop"]
    if dropped:
        raise HealthError("; ".join(map(told, dropped)))
    for url, action in actions.items():
        if action == "plain" and url not in doubted:
            _hold(engines[url], second[url])
        elif action == "speculate" and url not in unchecked:
            _release(engines[url])
    return PushHealth(actions, records, unchecked)


@cache
def drafter_names(hf_checkpoint: str) -> Callable[[str], bool]:
    """Whether a tensor is the drafter's. Of a family without a table nothing is known: all count as the target's."""
    config = json.loads(Path(hf_checkpoint, "config.json").read_text())
    try:
        return frozenset(family_of(config).drafter_names).__contains__
    except ValueError:
        return frozenset().__contains__


def told(record: Mapping[str, Any]) -> str:
    """A record of `after_push` in one line: engine, what was found, what followed."""
    lasting = record["after_second_push"]
    outcome = {"speculate": "healthy after a second push", "plain": "no speculation until a later push"}
    verdict = outcome.get(record["action"], "may not serve")
    return f"{record['engine']}, version {record['version']}: {verdict}: {'; '.join(lasting or record['found'])}"


def _record(
    url: str, version: int, first: Sequence[Finding], second: Sequence[Finding], action: Action
) -> dict[str, Any]:
    lines = [[f"{f.detector}: {f.message}" for f in findings] for findings in (first, second)]
    return {
        "event": "health",
        "version": version,
        "engine": url,
        "found": lines[0],
        "after_second_push": lines[1],
        "action": action,
    }


def _examine(
    engines: Mapping[str, Engine],
    sent: Marks,
    version: int,
    is_drafter: Callable[[str], bool],
    unchecked: dict[str, str],
) -> dict[str, list[Finding]]:
    def findings(url: str) -> list[Finding]:
        engine = engines[url]
        try:
            held, named = engine.fingerprints(), engine.version()
        except RefusedError as error:
            if url not in unchecked:
                logger.warning("rlspec: what this engine holds cannot be checked: %s", error)
            unchecked[url] = str(error)
            return []
        except EngineError as error:
            return [Finding("session", str(error), target=True)]
        found = []
        if named != str(version):
            found.append(Finding("stamp", f"names version {named or 'none'}, expected {version}", target=True))
        difference = compare(sent, held)
        if not difference.empty:
            target = not all(map(is_drafter, difference.names))
            found.append(Finding("fingerprint", str(difference), target))
        return found

    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        return dict(zip(engines, threads.map(findings, engines), strict=True))


def _hold(engine: Engine, findings: Sequence[Finding]) -> None:
    try:
        engine.hold("; ".join(f.message for f in findings)[:500])
    except EngineError as error:  # it drafts on: slower, not wrong, since the target verifies
        logger.warning("rlspec: speculation could not be turned off: %s", error)


def _release(engine: Engine) -> None:
    try:
        engine.release()
    except EngineError as error:
        logger.warning("rlspec: speculation could not be turned on again: %s", error)


class Speculation:
    """What rollouts teach about speculation, and how engines hear of it: one object as long as rollouts are driven.

    `configs`: what the engines can run, by their own account; needed with a cost table, which may not know all of it.
    """

    def __init__(
        self,
        adapter: Adapter,
        configs: Iterable[SpecConfig] = (),
        settings: HealthSettings | None = None,
        api_key: str = "",
    ) -> None:
        self.adapter, self.configs, self.api_key = adapter, frozenset(configs), api_key
        self.settings = settings or HealthSettings()
        self.forecast = Forecast(adapter.acceptance.depth)
        self.drift: dict[str, Drift] = {}
        self.versions: dict[str, str] = {}  # under which each engine's drift test began
        self._table = CostTable.load(adapter.cost["table"]) if "table" in adapter.cost else None

    def before_rollout(self, prediction: Prediction | None) -> dict[str, float]:
        """Training's prediction of what the rollout that begins will accept, calibrated: `predict/next_tokens_k*`."""
        return self.forecast.expect(prediction)

    def after_rollout(self, urls: Sequence[str]) -> dict[str, float]:
        """Gather every engine's rounds, learn from them together, and give every engine the policy that follows.

        Acceptance is learnt as a ratio of sums over all engines; times scale the cost table, if there is one. An engine
        whose drafts are accepted far less than expected is held without speculation until the next push. Returns
        `rollout/spec_*`, `predict/*` (the rollout's prediction against it) and `health/*`. An engine that does not
        answer is left out: to keep engines alive is slime's part.
        """
        engines = {url: Engine(url, self.api_key) for url in urls}
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            seen = dict(zip(engines, threads.map(_observations, engines.values()), strict=True))
            heard = {url: found for url, found in seen.items() if found is not None}
            held = [url for url, found in heard.items() if self._drifts(engines[url], *found)]
            stats = [s for rounds, _, _ in heard.values() for s in rounds]
            values = self.adapter.observe(stats, [report for _, report, _ in heard.values()]) if stats else {}
            policy = self.policy(stats)
            told = threads.map(lambda url: _tell(engines[url], policy), heard)
            deaf = len(seen) - sum(told)
        found = {f"rollout/{name.replace('/', '_', 1)}": value for name, value in values.items()}
        found |= self.forecast.score(stats)
        return found | {
            "health/drifting_engines": float(len(held)),
            "health/deaf_engines": float(deaf),
        }

    def policy(self, stats: Sequence[RoundStats] = ()) -> dict[str, Any]:
        """What an engine's `set_policy` takes, with the table scaled by what rounds took."""
        policy = self.adapter.policy()
        if self._table is not None:
            self._table = self._table.calibrated(stats)
            policy["table"] = self._table.to_json()
            known = [c for c in self._table.configs() if c in self.configs]
            policy["candidates"] = [[c.num_steps, c.topk, c.num_draft_tokens] for c in known]
        return policy

    def _drifts(self, engine: Engine, stats: Sequence[RoundStats], _: Any, version: str) -> bool:
        if self.versions.get(engine.url) != version:
            self.versions[engine.url], self.drift[engine.url] = version, Drift(self.settings, {})
        drift = self.drift[engine.url]
        drift.predicted.update(self.adapter.expected())
        finding = drift.observe(stats)
        if finding is None or drift.alarmed:
            return False
        drift.alarmed = True
        logger.error("rlspec: %s: no speculation until a later push: %s", engine.url, finding.message)
        _hold(engine, [finding])
        return True

    def state(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps."""
        table = None if self._table is None else self._table.to_json()
        return {
            "acceptance": self.adapter.acceptance.to_json(),
            "forecast": self.forecast.to_json(),
            "table": table,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; of the table its scale, where this run decides by the same measurements."""
        self.adapter.acceptance = Acceptance.from_json(state["acceptance"])
        self.forecast = Forecast.from_json(state["forecast"])
        if self._table is not None and state["table"] is not None:
            table = CostTable.from_json(state["table"], "checkpoint")
            self._table = table if table.provenance == self._table.provenance else self._table


def _observations(engine: Engine) -> tuple[list[RoundStats], dict[str, Any], str] | None:
    """(rounds, policy's report, version), or None of an engine that does not tell."""
    try:
        return engine.stats(), engine.policy_report(), engine.version()
    except EngineError as error:
        logger.warning("rlspec: nothing is learnt of this engine's rounds: %s", error)
        return None


def _tell(engine: Engine, policy: Mapping[str, Any]) -> bool:
    try:
        engine.set_policy(policy)
    except EngineError as error:
        logger.warning("rlspec: this engine's speculation stays as it is: %s", error)
        return False
    return True
