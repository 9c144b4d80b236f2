"""SGLang's CPU engine multiplies by packed weights, and by the new ones after an update."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.packed import LEAST
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

READERS = {
    "begin_weight_update",
    "destroy_weights_update_group",
    "flush_cache_after_weight_update",
    "get_weights_by_name",
    "init_weights_update_group",
    "record_weight_version_after_update",
    "release_memory_occupation",
    "save_remote_model",
    "save_sharded_model",
}
SERVE = "--device cpu --dtype float32 --max-total-tokens 4096 --max-running-requests 8 "
SERVE += "--spec adaptive --candidate-steps 0,2 --num-steps 2"


def test_all_commands_of_sglang_that_write_weights_are_known():
    pytest.importorskip("sglang")
    from megatron_rlspec.rollout.sglang.cpu import products, stand_ins

    stand_ins.install()
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    commands = {name for name, _ in inspect.getmembers(Updater, inspect.isfunction) if not name.startswith("_")}
    assert commands - READERS == set(products.WRITERS)


@pytest.mark.slow
def test_texts_follow_an_update_of_packed_weights(tmp_path: Path):
    pytest.importorskip("sglang")
    import embedded_oracle as oracle

    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.rollout.sglang.client.launcher import launch

    first, second = (
        oracle.tiny(vocab=LEAST // 64, hidden=64, heads=4, kv_heads=2, drafter="close", sharpness=1.5, seed=seed)
        for seed in (3, 4)
    )
    config = first[0] | {"attention_bias": True, "torch_dtype": "float32", "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_window_layers": 2}))
    save_file({k: v.float() for k, v in first[1].items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rng = np.random.default_rng(0)
    wanted = [Request(f"r{i}.", Prompt(i, rng.integers(3, LEAST // 64, 9)), i) for i in range(8)]
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    with launch(tmp_path, tmp_path / "log", arguments=SERVE.split()) as process:
        theirs = SGLangEngine.of(process.wait(), timeout=200)
        for version, (_, tensors) in enumerate((first, second)):
            ours = EmbeddedEngine(config, [(k, v.float()) for k, v in tensors.items()])
            if version:
                theirs.update_weights(version, [(k, v.float()) for k, v in tensors.items()])
            expected = [sample.response.tolist() for sample in ours.generate(wanted, sampling)]
            for spec in (SpecConfig(2), OFF):
                theirs.set_config(spec)
                assert [sample.response.tolist() for sample in theirs.generate(wanted, sampling)] == expected
