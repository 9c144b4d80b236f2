"""The push contract for slime's engines: `after_push(urls, sent, version, is_drafter, push_again)`.

`urls` are those of plain `sglang.launch_server` processes with the plugin (`RLSPEC_SGLANG` set), which adds the routes
that are used here. `sent` are the fingerprints of every tensor of one push, by their names in the checkpoint. This file
imports no slime, no Ray and no Megatron: `push.py` and `metrics.py` call it from slime's own classes. `speculation.py`
sets the engines' rules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import requests

from megatron_rlspec.engine import EngineError
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.names import name_table
from megatron_rlspec.push import contract
from megatron_rlspec.push.contract import Findings, HealthError, Verdict, enforce
from megatron_rlspec.push.detectors import Finding, fingerprint_finding
from megatron_rlspec.push.fingerprint import Difference, as_delivered, compare
from megatron_rlspec.rollout.sglang.client.connection import RefusedError
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine

logger = logging.getLogger(__name__)
Fingerprints = Mapping[str, int]  # by a tensor's name in the checkpoint
TIMEOUT = 600.0  # seconds


class SlimeEngine(SGLangEngine):
    """The client of an engine that slime pushes to."""

    def __init__(self, url: str, api_key: str = "") -> None:
        super().__init__(url, api_key=api_key, timeout=TIMEOUT)

    def version(self) -> str:
        """Return the weight version that SGLang reports. Raises EngineError."""
        url = f"{self.url}/model_info"
        with requests.Session() as session:
            session.trust_env = False  # no proxy lies between the machines of a job
            try:
                answer = session.get(url, headers=self._headers, timeout=TIMEOUT)
                answer.raise_for_status()
            except requests.RequestException as error:
                raise EngineError(f"{self.url}: model_info failed: {error}") from None
        return str(answer.json()["weight_version"])


@dataclass(frozen=True)
class PushHealth(Verdict):
    """The action for each engine, by URL.

    by_delivery  engines that report what their loaders were given, but not what they hold
    unchecked    engines that report neither
    """

    by_delivery: frozenset[str]
    unchecked: frozenset[str]

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {
            "health/engines_by_delivery": float(len(self.by_delivery)),
            "health/unchecked_engines": float(len(self.unchecked)),
        }


def after_push(
    urls: Sequence[str],
    sent: Fingerprints,
    version: int,
    is_drafter: Callable[[str], bool],
    push_again: Callable[[], Fingerprints] | None = None,
    api_key: str = "",
    quantised: bool = False,
) -> PushHealth:
    """Check that every engine reports `version` and holds exactly what was `sent`; otherwise push once more.

    Some engines cannot report what they hold: drafters of families that `served_weights.py` has no names for, and
    `quantised` weights, which engines re-pack. Then the loaders of both models must have been given what was sent.

    `push_again` pushes everything to all engines, under the same version, and returns what it sent; None if the push
    cannot be repeated. `contract.enforce` decides what follows. Raises HealthError, one line with engines and tensors,
    if a target may be wrong: training must not use samples of such an engine.
    """
    engines = {url: SlimeEngine(url, api_key) for url in urls}
    examination = _Examination(version, is_drafter, quantised)

    def examine_again(doubted: Sequence[str]) -> Findings:
        assert push_again is not None
        return examination.findings(engines, push_again())

    verdict = enforce(
        version,
        examination.findings(engines, sent),
        None if push_again is None else examine_again,
        lambda url, findings: contract.hold(engines[url], findings),
    )
    wrong_targets: list[str] = []
    for record in verdict.records:
        logger.error("rlspec: %s", contract.summary(record))
        if record["action"] == "drop":
            wrong_targets.append(contract.summary(record))
    if wrong_targets:
        raise HealthError("; ".join(wrong_targets))
    for url in verdict.engines("speculate"):
        if url not in examination.unchecked:
            contract.release(engines[url])
    return PushHealth(
        verdict.actions,
        verdict.records,
        frozenset(examination.by_delivery),
        frozenset(examination.unchecked),
    )


def described(hf_checkpoint: str, eagle3: str) -> dict[str, Any]:
    """Return config.json of a policy, with that of its EAGLE-3 drafter in the directory `eagle3`, if there is one."""
    config = json.loads(Path(hf_checkpoint, "config.json").read_text())
    if eagle3:
        config["num_nextn_predict_layers"] = 0
        config[DRAFTER] = json.loads(Path(eagle3, "config.json").read_text())
    return config


@cache
def drafter_names(hf_checkpoint: str, eagle3: str = "") -> Callable[[str], bool]:
    """Return a function that tells whether a tensor is the drafter's. Without a name table, none is.

    eagle3  directory of an EAGLE-3 drafter, which then is the drafter
    """
    config = described(hf_checkpoint, eagle3)
    try:
        names = frozenset(name_table(config).drafter_names)
    except ValueError:
        names = frozenset()
    return names.__contains__


class _Examination:
    """Asks engines what they hold after a push, and after a second one."""

    def __init__(self, version: int, is_drafter: Callable[[str], bool], quantised: bool) -> None:
        self.version = version
        self.is_drafter = is_drafter
        self.quantised = quantised
        self.by_delivery: set[str] = set()
        self.unchecked: set[str] = set()

    def findings(self, engines: Mapping[str, SlimeEngine], sent: Fingerprints) -> Findings:
        """Compare every engine with `sent`. Returns the findings by URL."""
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            found = threads.map(lambda engine: self._examine(engine, sent), engines.values())
            return dict(zip(engines, found, strict=True))

    def _examine(self, engine: SlimeEngine, sent: Fingerprints) -> list[Finding]:
        try:
            difference = self._difference(engine, sent)
            if difference is None:
                return []
            version = engine.version()
        except EngineError as error:
            return [Finding("session", str(error), target=True)]
        findings = []
        if version != str(self.version):
            message = f"names version {version or 'none'}, expected {self.version}"
            findings.append(Finding("stamp", message, target=True))
        if finding := fingerprint_finding(difference, self.is_drafter):
            findings.append(finding)
        return findings

    def _difference(self, engine: SlimeEngine, sent: Fingerprints) -> Difference | None:
        """Compare with `sent`. Returns None if the engine reports neither what it holds nor what it was given."""
        if not self.quantised and engine.url not in self.by_delivery:
            try:
                return compare(sent, engine.held_fingerprints())
            except RefusedError as error:
                logger.info("rlspec: by delivery only: %s", error)
        try:
            given = engine.delivered()
        except RefusedError as error:
            if engine.url not in self.unchecked:
                logger.warning("rlspec: what this engine holds cannot be checked: %s", error)
            self.unchecked.add(engine.url)
            return None
        self.by_delivery.add(engine.url)
        loaded = as_delivered(given, self.is_drafter)
        return compare(sent, {name: loaded[name] for name in sent if name in loaded})
