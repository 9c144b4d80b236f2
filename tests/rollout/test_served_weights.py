"""Fingerprints of an engine whose ranks hold parts of tensors, or whose weights have no known names."""

from __future__ import annotations

import os
import weakref

import pytest
import tiny_mimo
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.push.fingerprint import as_delivered, compare, fingerprint
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.scheduler.served_weights import TensorPart, joined, marks_of


def held(full: torch.Tensor, dim: int, rank: int, size: int) -> TensorPart:
    width = full.shape[dim] // size
    return TensorPart("w", full.narrow(dim, rank * width, width).clone(), tuple(full.shape), dim, rank * width)


def mark(ranks: list[TensorPart]) -> int:
    return joined([marks_of([h], [None]) for h in ranks], [[h.first] for h in ranks])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_fingerprints_of_parts_sum_to_that_of_the_tensor(dim, dtype):
    full = torch.randn(48, 40).to(dtype)
    ranks = [held(full, dim, rank, 2) for rank in range(2)]
    assert mark(ranks) == fingerprint(full)
    ranks[1].part[0, 0] += 1
    assert mark(ranks) != fingerprint(full)
    assert mark([held(full, dim, rank, 2) for rank in (1, 0)]) == fingerprint(full)
    exchanged = [
        TensorPart("w", held(full, dim, 1 - r, 2).part, (48, 40), dim, held(full, dim, r, 2).first) for r in (0, 1)
    ]
    assert mark(exchanged) != fingerprint(full)


def test_one_copy_in_another_type_lives_at_a_time(monkeypatch):
    copies = []
    placed = TensorPart.placed

    def noted(part):
        copies.append(weakref.ref(part))
        assert sum(copy() is not None for copy in copies) <= 2  # and the one before, while the next is made
        return placed(part)

    monkeypatch.setattr(TensorPart, "placed", noted)
    parts = [TensorPart("w", torch.ones(8), (8,)) for _ in range(8)]
    assert marks_of(parts, [torch.bfloat16] * 8) == [fingerprint(torch.ones(8, dtype=torch.bfloat16))] * 8


def test_replicas_on_several_ranks_must_agree():
    """Test norms, which every rank holds, and key heads that two of four ranks share."""
    norm = torch.randn(64)
    keys = torch.randn(32, 64)
    copies = [TensorPart("norm", norm.clone(), (64,)) for _ in range(4)]
    shared = [held(keys, 0, rank // 2, 2) for rank in range(4)]
    assert mark(copies) == fingerprint(norm) and mark(shared) == fingerprint(keys)
    for rank in range(4):
        for ranks, whole in ((copies, norm), (shared, keys)):
            ranks[rank].part.view(-1)[3] *= 2
            assert mark(ranks) != fingerprint(whole), rank
            ranks[rank].part.view(-1)[3] /= 2


def test_a_word_across_two_ranks_is_refused():
    with pytest.raises(ValueError, match="w: a part of 6 bytes a row; expected a multiple of 8"):
        held(torch.zeros(4, 6, dtype=torch.bfloat16), 1, 0, 2).placed()


@pytest.mark.slow
def test_a_tensor_parallel_engine_is_pushed_to_and_proven(tmp_path):
    c = tiny_mimo.config(hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab=192)
    old = tiny_mimo.weights(c)
    new = tiny_mimo.weights(c, seed=1)
    tiny_mimo.write(tmp_path / "model", c, old)
    cores = "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * 2)
    options = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--tp", "2"]
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": cores}
    with launch(tmp_path / "model", tmp_path / "log", arguments=options, environment=environment) as process:
        engine = SGLangEngine.of(process.wait(), timeout=60)
        assert compare({n: fingerprint(t) for n, t in old.items()}, engine.fingerprints()).empty
        pusher = Pusher({"e": engine})
        assert not pusher.push(1, lambda scope: new.items()).failed
        layers = ("0.mlp.up_proj.weight", "0.self_attn.k_proj.bias", "1.self_attn.o_proj.weight")
        others = ("model.norm.weight", "model.mtp_layers.0.input_proj.weight", "lm_head.weight")
        for name in (*(f"model.layers.{layer}" for layer in layers), *others):
            engine.update_weights(2, {**new, name: old[name]}.items())
            assert pusher.compare_with(pusher.engines["e"]).differing == (name,)
        with pytest.raises(EngineError, match=r"lm_head.weight is \[96, 128\], but the engine's is \[192, 128\]"):
            engine.update_weights(3, {**new, "lm_head.weight": new["lm_head.weight"][:96]}.items())


MISTRAL = tiny_mimo.config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=160)
MISTRAL |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": False}
MISTRAL["num_nextn_predict_layers"] = 0
REASON = "SGLang's MistralForCausalLM stores weights in a form that is not known here"


def mistral(seed: int = 0) -> dict:
    found = tiny_mimo.weights(MISTRAL, seed)
    return {name: tensor for name, tensor in found.items() if "mtp_layers" not in name and "bias" not in name}


def test_each_tensor_counts_by_the_loader_that_keeps_it():
    delivered = {"target": {"a": 1, "mtp.b": 2}, "drafter": {"a": 3, "mtp.b": 4}}
    assert as_delivered(delivered, {"mtp.b"}.__contains__) == {"a": 1, "mtp.b": 4}


@pytest.mark.slow
def test_a_push_to_an_unknown_family(tmp_path, caplog):
    old = mistral()
    new = mistral(seed=1)
    tiny_mimo.write(tmp_path / "model", MISTRAL, old)
    options = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--spec", "off"]
    log = tmp_path / "log"
    with launch(tmp_path / "model", log, arguments=options) as process:
        engine = SGLangEngine.of(process.wait(), timeout=60)
        assert engine.describe()["unnamed"] == REASON
        pusher = Pusher({"e": engine})
        assert not pusher.push(1, lambda scope: new.items()).failed
        assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in new.items()}
        name = "model.layers.0.mlp.up_proj.weight"
        engine.update_weights(2, {**new, name: old[name]}.items())
        assert pusher.compare_with(pusher.engines["e"]).differing == (name,)
    assert sum(REASON in record.getMessage() for record in caplog.records) == 1
    assert log.read_text().count(REASON) == 1
