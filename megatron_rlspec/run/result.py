"""The result of a run: policy and drafter as Hugging Face checkpoints that people can upload."""

from __future__ import annotations

import math
import sys
from itertools import chain
from pathlib import Path

from megatron_rlspec.config import DrafterConfig
from megatron_rlspec.conversion.drafter_files import build_drafter
from megatron_rlspec.files import read_json, tell
from megatron_rlspec.host import ranks
from megatron_rlspec.models.config import DRAFTER, STATED
from megatron_rlspec.models.hf_files import build_hf, publish, write_json
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.push.push import Source, exporting
from megatron_rlspec.run.loading import Loaded
from megatron_rlspec.run.model_card import card
from megatron_rlspec.run.recording import Records
from megatron_rlspec.train.step import Trainer

BEST = "hf-best"
REWARD = "reward.json"  # of the model in hf-best/
CARD = "README.md"


def keep_best(loaded: Loaded, trainer: Trainer, records: Records, reward: float) -> bool:
    """Write the model to `run_dir/hf-best` if its reward is above that of the model there. Collective.

    reward  of the policy, on rank 0

    Returns whether it is. Raises FileError.
    """
    held = Path(trainer.config.train.run_dir) / BEST / REWARD
    best = read_json(held)["reward"] if held.exists() else -math.inf
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

    Older directories of other names than hf/ are replaced. `records` know what the model card says. The `reward` of
    this policy lies beside it, if it is given.
    """
    config = trainer.config
    model_path = config.model.path
    result = Path(config.train.run_dir) / name
    # directories by the names that they get at the end; the policy's is the last
    built: dict[Path, Path] = {}
    with exporting(trainer.export) as source:
        if source is not None:
            sharpness = trainer.sharpness
            built = build_result(model_path, config.drafter, loaded, source, result, sharpness)
    if not built:
        return
    drafter = next(iter(built))
    has_mtp = drafter == result and bool(loaded.hf_config.get("num_nextn_predict_layers"))
    eagle3 = drafter if drafter != result else None
    text = card(model_path, records.about, result, eagle3, has_mtp)
    (built[result] / CARD).write_text(text)
    if reward is not None:
        write_json(built[result] / REWARD, {"reward": reward})
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
    """Write the directories of drafter and policy, which can be one, beside their names. Return them by name.

    sharpness  with which drafts begin that are sampled from the drafter; None: as config.json says
    """
    hf_config = loaded.hf_config
    chosen = {} if sharpness is None else {STATED: sharpness}
    if DRAFTER not in hf_config:
        tensors = source("all")
        if not drafter.train:
            # The trainer has no drafter; the engines draft with that of model.path.
            frozen = sorted(drafter_names(hf_config) & loaded.tensors.keys())
            tensors = chain(tensors, ((name, loaded.tensors[name]) for name in frozen))
        return {target: build_hf(target, hf_config | chosen, tensors, model_path)}
    policy_config = dict(hf_config)
    del policy_config[DRAFTER]
    built = {}
    if drafter.train:
        assert loaded.eagle3_ids is not None
        beside = target.with_name(f"{target.name}_drafter")
        built[beside] = build_drafter(
            beside,
            hf_config[DRAFTER] | chosen,
            source("drafter"),
            loaded.eagle3_ids,
            drafter.path,
        )
    return built | {target: build_hf(target, policy_config, source("target"), model_path)}
