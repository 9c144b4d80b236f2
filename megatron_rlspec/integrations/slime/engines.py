"""The push contract for slime's engines: `after_push` checks that every engine holds what slime pushed.

The engines are plain `sglang.launch_server` processes with this package's plugin (`RLSPEC_SGLANG` set), which adds the
routes that are used here. This file imports no slime, no Ray and no Megatron: `push.py` and `rollout.py` call it from
slime's own classes. `speculation.py` sets the engines' rules.
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
# By a tensor's name in the checkpoint; `push.fingerprint` computes them.
Fingerprints = Mapping[str, int]


class SlimeEngine(SGLangEngine):
    """The client of an engine that slime pushes to."""

    def version(self) -> str:
        """Return the weight version that SGLang reports. Raises EngineError."""
        return str(self.get_from_sglang("model_info")["weight_version"])


class SlimePushes(Pusher):
    """A `Pusher` for `Health` whose pushes slime itself makes: `push` only compares the engines.

    Set `expected`, the fingerprints that slime sent, before the first `push`.
    """

    def push(
        self, version: int, source: Any, scope: Scope = "all", only: Sequence[str] | None = None
    ) -> PushReport:
        """Compare every engine with `expected`. Its first call belongs to the push that slime has just made.

        only  given by `Health` for a second push: `source()`, if there is one, then pushes everything to all engines
              first, and returns the fingerprints that it sent
        """
        if only is not None and source is not None:
            self.expected = source()
        reports, errors = ask_all(self.engines, lambda engine: self._compared(engine, version))
        for name, error in errors.items():
            reports[name] = EngineReport(0, str(error))
        # No bytes and no seconds: slime counts its own pushes.
        return PushReport(version, scope, 0.0, 0, len(self.expected), 0.0, 0.0, reports)

    def _compared(self, engine: Any, version: int) -> EngineReport:
        """Return a report of the tensors that the engine holds otherwise than sent, with an error for another version.

        Raises EngineError.
        """
        difference = self.compare_with(engine)
        reported = engine.version()
        error = "" if reported == str(version) else f"names version {reported}, expected {version}"
        return EngineReport(0, error, difference)


def after_push(
    urls: Sequence[str],
    sent: Fingerprints,
    version: int,
    is_drafter: Callable[[str], bool],
    push_again: Callable[[], Fingerprints] | None = None,
) -> dict[str, float]:
    """Check that every engine reports `version` and holds exactly what was `sent`; otherwise push once more, if it can.

    Some engines cannot report what they hold: drafters of families that `served_weights.py` has no names for, and
    quantised weights, which engines re-pack. Then the loaders of both models must have been given what was sent.
    `contract.judge` decides what follows. Returns metrics `health/*`. Raises HealthError, one line with engines and
    tensors, if a target may be wrong: training must not use samples of such an engine.

    urls        of all engines that were pushed to
    sent        fingerprints of every tensor of the push
    is_drafter  tells whether a name is a tensor of the drafter: then only speculation suffers (`drafter_test`)
    push_again  pushes everything to all engines under the same version, and returns what it sent; None if the push
                cannot be repeated
    """
    if not urls:
        return Verdict({}, ()).metrics()
    pushes = SlimePushes({url: SlimeEngine(url) for url in urls})
    pushes.expected = dict(sent)
    health = Health(
        pushes,
        is_drafter,
        # `Health` would let a repaired engine speculate by this: `speculation.py` sets the rule before each rollout
        lambda name, engine: None,
        incident=lambda record: logger.error("rlspec: %s", summary(record)),
    )
    source: Any = push_again
    verdict = health.push(version, source).verdict
    wrong = [summary(record) for record in verdict.records if record["action"] == "drop"]
    if wrong:
        raise HealthError("; ".join(wrong))
    return verdict.metrics()


def hf_config_of(hf_checkpoint: str, eagle3: str = "") -> dict[str, Any]:
    """Return config.json of a policy, with that of its EAGLE-3 drafter under `DRAFTER`, if there is one.

    Raises OSError if a directory has no config.json.

    hf_checkpoint  the policy's directory
    eagle3         the drafter's directory; "" without one
    """
    config = json.loads(Path(hf_checkpoint, "config.json").read_text())
    if eagle3:
        config["num_nextn_predict_layers"] = 0  # the policy's own MTP layers are then no drafter
        config[DRAFTER] = json.loads(Path(eagle3, "config.json").read_text())
    return config


@cache
def drafter_test(hf_checkpoint: str, eagle3: str = "") -> Callable[[str], bool]:
    """Return a function that tells whether a tensor is the drafter's, by its name in the checkpoint.

    Without a name table for the family, none is. The directories are read once a process: the result is cached.

    eagle3  directory of an EAGLE-3 drafter, which then is the drafter; "" without one
    """
    try:
        names = drafter_names(hf_config_of(hf_checkpoint, eagle3))
    except ValueError:
        names = frozenset()
    return names.__contains__
