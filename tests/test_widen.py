"""A widened model computes what the narrow one does: logits, texts, acceptance, and a step of RL."""

import pytest
import torch
from gpu.widen import Shape, Widening, main
from short_run import run
from transformers import AutoModelForCausalLM

from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records

WIDER = ("--times", "4", "--head-size", "32", "--kv-heads", "4", "--ffn", "160", "--layers", "6")


def widened(start, folder):
    main([str(start / "model"), str(folder / "model"), *WIDER])
    (folder / "task").symlink_to(start / "task")
    return folder


def test_logits_are_the_narrow_models(start, tmp_path):
    wide = widened(start, tmp_path)
    narrow_shape = Shape.of_config(read_hf(start / "model")[0])
    wide_shape = Shape.of_config(read_hf(wide / "model")[0])
    assert wide_shape.hidden == 4 * narrow_shape.hidden and wide_shape.layers == 6

    tokens = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    narrow_logits, wide_logits = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(tokens).logits.detach()
        for model in (start / "model", wide / "model")
    )
    spread = narrow_logits.std()
    assert (wide_logits - narrow_logits).abs().max() < 1e-6 * spread


@pytest.mark.slow
def test_a_step_of_rl_with_its_push_is_the_narrow_models(start, tmp_path):
    """Two steps: the second rollout comes from engines that got the first step's policy and drafter by a push."""
    wide = widened(start, tmp_path)
    options = {"train__steps": 2, "rollout__engine": "embedded", "spec__mode": "fixed", "optimizer__lr": 1e-5}
    records = []
    for name, folder in (("narrow", start), ("wide", wide)):
        run(folder, tmp_path / name, **options)
        records.append(read_records(tmp_path / name / "metrics.jsonl"))
    for narrow_step, wide_step in zip(*records, strict=True):
        for name in ("rollout/reward", "rollout/accept_length", "rollout/response_tokens"):
            assert wide_step[name] == narrow_step[name]
        for name in ("policy/entropy", "drafter/loss_1"):
            assert abs(wide_step[name] - narrow_step[name]) < 1e-4 * narrow_step[name]

    narrow_config, narrow_tensors = read_hf(start / "model")
    wide_config, before = read_hf(wide / "model")
    _, after = read_hf(tmp_path / "wide/hf")
    widening = Widening(Shape.of_config(narrow_config), Shape.of_config(wide_config))
    for name, tensor in before.items():
        added = torch.ones_like(tensor, dtype=torch.bool)
        if name in narrow_tensors:
            added = widening.tensor(name, torch.ones_like(narrow_tensors[name])) == 0
        assert after[name][added].equal(tensor[added]), name
        assert added.all() or not after[name].equal(tensor), name
