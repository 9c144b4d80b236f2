"""Products with packed weights against `F.linear`, and copies after changes, in both engines."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from megatron_rlspec.rollout.embedded import packed as room
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.packed import LEAST, PackedWeights
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

TOLERANCE = {torch.float64: 0.0, torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.fixture
def small_matrices(monkeypatch):
    monkeypatch.setattr(room, "LEAST", 0)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("small_matrices")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_products_are_those_of_plain_weights(dtype, rows):
    packed = PackedWeights()
    weight = drawn(48, 32, dtype=dtype)
    bias = drawn(48, dtype=dtype, seed=1)
    x = drawn(rows, 32, dtype=dtype, seed=2)
    y = drawn(rows, 48, dtype=dtype, seed=3)
    before = y.clone()
    near = {"rtol": 0, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(packed.linear(x, weight, bias), F.linear(x, weight, bias), **near)
    torch.testing.assert_close(packed.add(y, x, weight), torch.addmm(y, x, weight.t()), **near)
    assert torch.equal(y, before)


@pytest.mark.usefixtures("small_matrices")
def test_a_changed_matrix_is_packed_again():
    packed = PackedWeights()
    fused = drawn(48, 32)
    x = drawn(3, 32, seed=1)
    packed.linear(x, fused)
    with torch.no_grad():
        fused[16:32].copy_(drawn(16, 32, seed=2))  # as `Decoder.write` does, through a view
    torch.testing.assert_close(packed.linear(x, fused), F.linear(x, fused), rtol=0, atol=1e-4)
    with torch.inference_mode():
        fused[:16].zero_()
        torch.testing.assert_close(packed.linear(x, fused), F.linear(x, fused), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("small_matrices")
def test_a_change_that_torch_does_not_count_needs_forget():
    packed = PackedWeights()
    weight = drawn(48, 32)
    x = drawn(3, 32, seed=1)
    stale = packed.linear(x, weight)
    weight.data.zero_()
    assert torch.equal(packed.linear(x, weight), stale)
    packed.forget()
    assert not packed.linear(x, weight).any()


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
