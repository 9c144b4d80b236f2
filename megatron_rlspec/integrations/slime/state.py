"""Small files that slime's train ranks and its RolloutManager exchange, most of them in `Options.folder`.

    prediction.json   the prediction of the next rollout's acceptance: one train rank writes it, `rollout.py` reads it
    rollouts.json     what `rollout.py` has learnt; train ranks copy it into and out of slime's checkpoints
    rlspec-sent.json  in slime's own folder for updates through the disk: version and fingerprints of the last one

All files are written whole or not at all (`files.write`), since another process may read at any time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.speculation.acceptance import Prediction

PREDICTION = "prediction.json"
ROLLOUTS = "rollouts.json"
SENT = "rlspec-sent.json"


def write_prediction(folder: Path, rollout_id: int, prediction: Prediction) -> None:
    """Write the prediction by training on the samples of rollout `rollout_id`, in place of an earlier one.

    One rank calls it (`hooks.py`).
    """
    content = {"after_rollout": rollout_id, "sums": prediction.sums()}
    files.write(folder / PREDICTION, json.dumps(content))


def read_prediction(folder: Path, rollout_id: int) -> Prediction | None:
    """Read the prediction by training on a rollout before `rollout_id`; None if there is none.

    A prediction by training on this rollout or a later one is left from a run that was then resumed at an earlier step:
    it counts as none.
    """
    written = _read(folder / PREDICTION)
    if written is None or written["after_rollout"] >= rollout_id:
        return None
    return Prediction.of_sums(*written["sums"])


def write_sent(args: Any, version: int, sent: dict[str, int]) -> None:
    """Write version and fingerprints, by name, of a full update through the disk. `args` are slime's."""
    content = json.dumps({"version": version, "sent": sent})
    files.write(Path(args.update_weight_disk_dir, SENT), content)


def read_sent(args: Any) -> dict[str, Any] | None:
    """Return `version` and `sent` of the last update through the disk; None before the first one."""
    return _read(Path(args.update_weight_disk_dir, SENT))


def write_rollouts(folder: Path, state: dict[str, Any]) -> None:
    """Write the state of `speculation.learning.Learning`."""
    files.write(folder / ROLLOUTS, json.dumps(state))


def read_rollouts(folder: Path) -> dict[str, Any] | None:
    """Return what `write_rollouts` wrote; None before the first rollout of a new run."""
    return _read(folder / ROLLOUTS)


def hand_on(source: Path | None, target: Path) -> None:
    """Copy `rollouts.json` from the folder `source` to `target`; remove that of `target` if `source` has none.

    A run that begins anew must not go on with what another one learnt in the same folder. One rank calls it.

    source  a folder of slime's checkpoint at a start, `Options.folder` at a save (`hooks.py`); None: nothing to go on
    """
    if source is not None and (source / ROLLOUTS).exists():
        files.write(target / ROLLOUTS, (source / ROLLOUTS).read_bytes())
    else:
        (target / ROLLOUTS).unlink(missing_ok=True)


def _read(file: Path) -> Any:
    """Return the content of a JSON file; None without the file."""
    return json.loads(file.read_text()) if file.exists() else None
