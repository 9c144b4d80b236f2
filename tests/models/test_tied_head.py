"""A model with tied embeddings whose files hold the head, too, as Qwen3-0.6B is published."""

import pytest
import torch
from weight_oracles import mimo_checkpoint

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.conversion.drafter_files import make_drafter, read_model
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import CheckpointError, read_hf, write_hf

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def model(folder, stored: str):
    """Write a tied Qwen2 that stores its embedding as `stored` says, and return its tensors without the head."""
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 0}
    config, tensors = mimo_checkpoint(tie_word_embeddings=True, eos_token_id=100, **qwen2)
    head = tensors[EMBEDDING].clone()
    if stored == "different":
        head += 1
    written = {**tensors, HEAD: head}
    if stored == "head only":
        del written[EMBEDDING]
    write_hf(folder, config, written, shard_bytes=100_000)
    (folder / "tokenizer.model").write_bytes(b"0")
    return tensors


def equal(found, tensors) -> bool:
    return set(found) == set(tensors) and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("stored", ["equal", "head only"])
def test_the_head_is_the_embedding(tmp_path, stored):
    tensors = model(tmp_path / "hf", stored)
    for use in ("train", "convert"):
        check_model(tmp_path / "hf", use, drafter=False)
    assert equal(read_hf(tmp_path / "hf")[1], tensors)
    convert(plan(tmp_path / "hf", tmp_path / "megatron"))
    convert(plan(tmp_path / "megatron", tmp_path / "back"))
    assert equal(read_hf(tmp_path / "back")[1], tensors)
    convert(plan(tmp_path / "hf", tmp_path / "mtp", to="hf", add_mtp=True), link=True)
    check_model(tmp_path / "mtp", "train")
    found = read_hf(tmp_path / "mtp")[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    make_drafter(tmp_path / "hf", tmp_path / "eagle3", 16)
    joined = read_model(tmp_path / "hf", tmp_path / "eagle3")[1]
    assert torch.equal(joined[EMBEDDING], tensors[EMBEDDING]) and HEAD not in joined


def test_sglang_needs_the_embedding_by_its_name(tmp_path):
    model(tmp_path / "equal", "equal")
    check_model(tmp_path / "equal", "serve", drafter=False)
    model(tmp_path / "hf", "head only")
    with pytest.raises(
        ValueError, match="holds model.embed_tokens.weight as lm_head.weight, which SGLang does not read"
    ):
        check_model(tmp_path / "hf", "serve", drafter=False)


def test_another_head_is_refused(tmp_path):
    model(tmp_path / "hf", "different")
    expected = "lm_head.weight differs from model.embed_tokens.weight; expected tie_word_embeddings=false"
    for use in ("train", "convert", "serve"):
        with pytest.raises(ValueError, match=expected) as told:
            check_model(tmp_path / "hf", use, drafter=False)
        assert "\n" not in str(told.value)
    with pytest.raises(CheckpointError, match=expected):
        read_hf(tmp_path / "hf")
