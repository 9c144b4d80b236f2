"""Small files in the folder of `rlspec slime` that slime's train ranks and its RolloutManager exchange.

`prediction.json`  the train ranks' forecast of the next rollout
`rollouts.json`    the state learnt from rollouts; train ranks copy it into and out of slime's checkpoints
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.speculation.acceptance import Prediction

PREDICTION = "prediction.json"
ROLLOUTS = "rollouts.json"
# beside the files of a full update through the disk: its version and fingerprints
SENT = "rlspec-sent.json"


def write_prediction(folder: Path, rollout_id: int, prediction: Prediction) -> None:
    content = {"after_rollout": rollout_id, "sums": prediction.sums()}
    files.write(folder / PREDICTION, json.dumps(content))


def read_prediction(folder: Path, rollout_id: int) -> Prediction | None:
    """Read the prediction of training on rollouts before `rollout_id`; None if there is none yet."""
    written = _read(folder / PREDICTION)
    if written is None or written["after_rollout"] >= rollout_id:
        return None
    return Prediction.of_sums(*written["sums"])


def write_sent(args: Any, version: int, sent: dict[str, int]) -> None:
    content = json.dumps({"version": version, "sent": sent})
    files.write(Path(args.update_weight_disk_dir, SENT), content)


def read_sent(args: Any) -> dict[str, Any] | None:
    return _read(Path(args.update_weight_disk_dir, SENT))


def write_rollouts(folder: Path, state: dict[str, Any]) -> None:
    files.write(folder / ROLLOUTS, json.dumps(state))


def read_rollouts(folder: Path) -> dict[str, Any] | None:
    return _read(folder / ROLLOUTS)


def hand_on(source: Path | None, target: Path) -> None:
    """Copy `rollouts.json` from `source` to `target`; remove the target's if the source has none."""
    if source is not None and (source / ROLLOUTS).exists():
        files.write(target / ROLLOUTS, (source / ROLLOUTS).read_bytes())
    else:
        (target / ROLLOUTS).unlink(missing_ok=True)


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None
