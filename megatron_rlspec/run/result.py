"""Write the result of a run: policy and drafter as Hugging Face checkpoints that people can upload.

`session.py` calls `write_result` at the end and every `train.export_every` steps, and `keep_best` after evaluations.
"""

from __future__ import annotations

import math
import sys
from itertools import chain
from pathlib import Path

from megatron_rlspec.config import DrafterConfig
from megatron_rlspec.conversion.drafter_files import build_drafter
from megatron_rlspec.files import read_json, tell
from megatron_rlspec.host import ranks
from megatron_rlspec.models.config import DRAFTER, SHARPNESS_KEY
from megatron_rlspec.models.hf_files import build_hf, publish, write_json
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.push.push import Source, exporting
from megatron_rlspec.run.loading import Loaded
from megatron_rlspec.run.model_card import card
from megatron_rlspec.run.recording import Records
from megatron_rlspec.train.step import Trainer

BEST = "hf-best"  # directory, in the run's, of the model with the highest reward in an evaluation
REWARD = "reward.json"  # file in it: {"reward": number}, which a resumed run compares with
CARD = "README.md"


def keep_best(loaded: Loaded, trainer: Trainer, records: Records, reward: float) -> bool:
    """Write the model to `run_dir/hf-best` if its reward is above that of the model there. Collective.

    reward  of the policy, on rank 0; its value on other ranks is not used

    Returns, on every rank, whether the model was written. Raises FileError.
    """
    file = Path(trainer.config.train.run_dir) / BEST / REWARD
    best = read_json(file)["reward"] if file.exists() else -math.inf
    # Rank 0's answer on every rank: only rank 0 knows the reward, and writing is collective.
    better: bool = ranks.job().tell(reward > best)
    if better:
        write_result(loaded, trainer, records, BEST, reward)
    return better


def write_result(
    loaded: Loaded,
    trainer: Trainer,
    records: Records,
    name: str = "hf",
    reward: float | None = None,
) -> None:
    """Write policy and drafter to `run_dir/NAME`; an EAGLE-3 drafter goes to `run_dir/NAME_drafter`. Collective.

    A directory that is there already is replaced, except hf/, the result of a finished run: then this raises OSError.

    records  with the figures for the model card
    reward   of this policy; None: no file REWARD is written
    """
    config = trainer.config
    model_path = config.model.path
    result = Path(config.train.run_dir) / name
    # directories by the names that they get at the end; the policy's is the last. Empty on ranks above 0
    built: dict[Path, Path] = {}
    with exporting(trainer.export) as source:
        if source is not None:  # rank 0
            sharpness = trainer.sharpness
            built = build_result(model_path, config.drafter, loaded, source, result, sharpness)
    if not built:
        return
    first = next(iter(built))  # the EAGLE-3 drafter's, if there is one; else the policy's
    has_mtp = first == result and bool(loaded.hf_config.get("num_nextn_predict_layers"))
    eagle3 = first if first != result else None
    text = card(model_path, records.about, result, eagle3, has_mtp)
    (built[result] / CARD).write_text(text)
    if reward is not None:
        write_json(built[result] / REWARD, {"reward": reward})
    # Last, and the policy at the end: a directory with its final name has all files, and its drafter is there.
    for target, directory in built.items():
        publish(directory, target, replace=name != "hf")
    what = f"{'policy and drafter' if has_mtp else 'the policy'} as a Hugging Face checkpoint"
    if eagle3 is not None:
        what = f"the policy, and {eagle3}, its EAGLE-3 drafter"
    tell(f"written: {result}, {what}", sys.stdout)


def build_result(
    model_path: str,
    drafter: DrafterConfig,
    loaded: Loaded,
    source: Source,
    target: Path,
    sharpness: float | None,
) -> dict[Path, Path]:
    """Write policy and drafter to unfinished directories beside `target`, which `publish` then gives their names.

    An MTP drafter is in the policy's directory, an EAGLE-3 drafter in one of its own. A drafter that was not trained
    stays what it was: an MTP layer is copied from model.path, an EAGLE-3 drafter is not written.

    source     exports tensors; rank 0 alone calls it, inside `exporting`
    sharpness  of coupled drafts, for config.json; None: as config.json of model.path says

    Returns the directories by their final names, the policy's last.
    """
    hf_config = loaded.hf_config
    stated = {} if sharpness is None else {SHARPNESS_KEY: sharpness}
    if DRAFTER not in hf_config:
        tensors = source("all")
        if not drafter.train:
            # The trainer has no drafter to export; the engines have drafted with that of model.path.
            frozen = sorted(drafter_names(hf_config) & loaded.tensors.keys())
            tensors = chain(tensors, ((name, loaded.tensors[name]) for name in frozen))
        return {target: build_hf(target, hf_config | stated, tensors, model_path)}
    policy_config = dict(hf_config)
    del policy_config[DRAFTER]
    built = {}
    if drafter.train:
        assert loaded.eagle3_ids is not None
        drafter_target = target.with_name(f"{target.name}_drafter")
        built[drafter_target] = build_drafter(
            drafter_target,
            hf_config[DRAFTER] | stated,
            source("drafter"),
            loaded.eagle3_ids,
            drafter.path,
        )
    return built | {target: build_hf(target, policy_config, source("target"), model_path)}
