"""The push contract for slime's engines: `after_push(urls, sent, version, is_drafter, push_again)`.

`urls` are those of plain `sglang.launch_server` processes with the plugin (`RLSPEC_SGLANG` set), which adds the routes
that are used here. `sent` are the fingerprints of every tensor of one push, by their names in the checkpoint. This file
imports no slime, no Ray and no Megatron: `push.py` and `rollout.py` call it from slime's own classes. `speculation.py`
sets the engines' rules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rlspec.engine import ask_all
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.push.contract import HealthError, Verdict, summary
from megatron_rlspec.push.health import Health
from megatron_rlspec.push.push import EngineReport, Pusher, PushReport
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Scope

logger = logging.getLogger(__name__)
Fingerprints = Mapping[str, int]  # by a tensor's name in the checkpoint


class SlimeEngine(SGLangEngine):
    """The client of an engine that slime pushes to."""

    def version(self) -> str:
        """Return the weight version that SGLang reports. Raises EngineError."""
        return str(self.get_from_sglang("model_info")["weight_version"])


class SlimePushes(Pusher):
    """Pushes that slime itself makes. `push` only examines the engines. Set `expected` before the first one."""

    def push(
        self, version: int, source: Any, scope: Scope = "all", only: Sequence[str] | None = None
    ) -> PushReport:
        """Compare every engine. The second time `source` pushes again before, unless it is None."""
        if only is not None and source is not None:
            self.expected = source()
        reports, silent = ask_all(self.engines, lambda engine: self._examined(engine, version))
        for name, error in silent.items():
            reports[name] = EngineReport(0, str(error))
        return PushReport(version, scope, 0.0, 0, len(self.expected), 0.0, 0.0, reports)

    def _examined(self, engine: Any, version: int) -> EngineReport:
        difference = self.compare_with(engine)
        found = engine.version()
        error = "" if found == str(version) else f"names version {found}, expected {version}"
        return EngineReport(0, error, difference)


def after_push(
    urls: Sequence[str],
    sent: Fingerprints,
    version: int,
    is_drafter: Callable[[str], bool],
    push_again: Callable[[], Fingerprints] | None = None,
) -> dict[str, float]:
    """Check that every engine reports `version` and holds exactly what was `sent`; otherwise push once more.

    Some engines cannot report what they hold: drafters of families that `served_weights.py` has no names for, and
    quantised weights, which engines re-pack. Then the loaders of both models must have been given what was sent.

    `push_again` pushes everything to all engines, under the same version, and returns what it sent; None if the push
    cannot be repeated. `contract.judged` decides what follows. Returns `health/*`. Raises HealthError, one line with
    engines and tensors, if a target may be wrong: training must not use samples of such an engine.
    """
    if not urls:
        return Verdict({}, ()).metrics()
    pushes = SlimePushes({url: SlimeEngine(url) for url in urls})
    pushes.expected = dict(sent)
    health = Health(
        pushes,
        is_drafter,
        lambda name, engine: None,  # slime's rollouts set the rule
        incident=lambda record: logger.error("rlspec: %s", summary(record)),
    )
    source: Any = push_again
    verdict = health.push(version, source).verdict
    wrong = [summary(record) for record in verdict.records if record["action"] == "drop"]
    if wrong:
        raise HealthError("; ".join(wrong))
    return verdict.metrics()


def described(hf_checkpoint: str, eagle3: str = "") -> dict[str, Any]:
    """Return config.json of a policy, with that of its EAGLE-3 drafter in the directory `eagle3`, if there is one."""
    config = json.loads(Path(hf_checkpoint, "config.json").read_text())
    if eagle3:
        config["num_nextn_predict_layers"] = 0
        config[DRAFTER] = json.loads(Path(eagle3, "config.json").read_text())
    return config


@cache
def drafter_test(hf_checkpoint: str, eagle3: str = "") -> Callable[[str], bool]:
    """Return a function that tells whether a tensor is the drafter's. Without a name table, none is.

    eagle3  directory of an EAGLE-3 drafter, which then is the drafter
    """
    try:
        names = drafter_names(described(hf_checkpoint, eagle3))
    except ValueError:
        names = frozenset()
    return names.__contains__
