"""Model directories as people publish them: ends of texts, tokenizers, experts in one tensor, Hub names, tied heads."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from harness import write_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from weight_oracles import mimo_checkpoint

from megatron_rlspec.config import load
from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.conversion.drafter_files import make_drafter, read_model
from megatron_rlspec.models.directory import check_model, ends_of_text
from megatron_rlspec.models.hf_files import CheckpointError, read_hf, write_hf
from megatron_rlspec.rollout import start
from megatron_rlspec.tasks.data import DataError, load_tokenizer


def test_a_text_ends_as_config_generation_config_and_tokenizer_say(tmp_path):
    model = write_model(tmp_path / "model")
    tokenizer = load_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    stated = config["eos_token_id"] = tokenizer.eos_token_id + 1
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [stated, stated + 1]}))
    expected = [tokenizer.eos_token_id, stated, stated + 1]
    assert list(ends_of_text(model, tokenizer)) == expected
    engine = start.embedded(load(None, {"model.path": str(model), "model.dtype": "float32", "spec.mode": "off"}))
    assert sorted(engine.scheduler.ends) == expected


TOKENIZER = """
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    def __init__(self, vocab_file=None, **more):
        self.words = {chr(i): i for i in range(60)}
        super().__init__(**more)
    @property
    def vocab_size(self): return 60
    def get_vocab(self): return dict(self.words)
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, word): return self.words.get(word, 0)
    def _convert_id_to_token(self, index): return chr(index)
"""


def test_a_tokenizer_in_python_needs_a_yes(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "tiktoken.model").write_text("")
    (model / "tokenization_letters.py").write_text(TOKENIZER)
    about = {"auto_map": {"AutoTokenizer": ["tokenization_letters.Letters", None]}, "tokenizer_class": "Letters"}
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="Python code in .*; model.trust_remote_code=true runs it"):
        check_model(model, "train", drafter=False)
    with pytest.raises(DataError):
        load_tokenizer(model)
    check_model(model, "train", drafter=False, trust_remote_code=True)
    assert load_tokenizer(model, trust_remote_code=True)("1+1")["input_ids"] == [49, 43, 49]


def test_a_tokenizer_of_another_class_is_not_taken_at_its_word(tmp_path):
    """DeepSeek-R1-Distill-Llama names the class of Llama 2, whose texts lose their spaces in this vocabulary."""
    model = write_model(tmp_path / "model")
    about = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(about | {"model_type": "llama"}))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(["the year 2023"], trainer)
    bpe.save(str(model / "tokenizer.json"))
    named = {"eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    right = bpe.encode("the year").ids
    assert transformers.AutoTokenizer.from_pretrained(model)("the year")["input_ids"] != right
    assert load_tokenizer(model)("the year")["input_ids"] == right


def test_experts_of_a_layer_in_one_tensor_are_read_one_by_one(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 4, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8}
    config = transformers.Qwen3MoeConfig(eos_token_id=1, vocab_size=64, **sizes)
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    model.save_pretrained(tmp_path / "apart")
    fused, apart = (read_hf(tmp_path / name)[1] for name in ("fused", "apart"))
    assert any(header.part for header in fused.headers.values()) and fused.keys() == apart.keys()
    assert all(torch.equal(fused[name], apart[name]) for name in apart)
    check_model(tmp_path / "fused", "train", drafter=False, tokenizer=False)
    check_model(tmp_path / "apart", "serve", drafter=False, tokenizer=False)
    with pytest.raises(CheckpointError, match="as model.layers.0.mlp.experts.*, which SGLang does not read"):
        check_model(tmp_path / "fused", "serve", drafter=False, tokenizer=False)
    convert(plan(tmp_path / "fused", tmp_path / "mtp", to="hf", add_mtp=True), link=True)
    assert holds(tmp_path / "mtp", apart, more=True)


def test_a_name_on_the_hub_is_read_from_its_cache(tmp_path):
    snapshot = tmp_path / "hub/models--some--model/snapshots/0123"
    write_model(snapshot)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text("0123")
    program = "import sys; from megatron_rlspec.models import hub; print(*map(hub.local, sys.argv[1:]))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def local(*names: str) -> subprocess.CompletedProcess:
        words = [sys.executable, "-c", program, *names]
        return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)

    assert local("some/model", "hub", "no-such").stdout.split() == [str(snapshot), "hub", "no-such"]
    assert "some/other: no such directory, and no model of that name from the Hub" in local("some/other").stderr


# ---- tied embeddings whose files hold the head, alone or, as Qwen3-0.6B is published, beside the embedding -----------


def model(folder, added_to_head: float = 0, *, alone: bool = False):
    """Write a tied Qwen2 whose files hold a head, and unless `alone` the embedding; return the tensors without head."""
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 0}
    config, tensors = mimo_checkpoint(tie_word_embeddings=True, eos_token_id=100, **qwen2)
    head = tensors["model.embed_tokens.weight"] + added_to_head
    written = {**tensors, "lm_head.weight": head}
    if alone:
        del written["model.embed_tokens.weight"]
    write_hf(folder, config, written, shard_bytes=100_000)
    (folder / "tokenizer.model").write_bytes(b"0")
    return tensors


def holds(folder, tensors, *, more: bool = False) -> bool:
    found = read_hf(folder)[1]
    return (more or found.keys() == tensors.keys()) and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("alone", [False, True])
def test_the_head_is_the_embedding(tmp_path, alone):
    tensors = model(tmp_path / "hf", alone=alone)
    for use in ("train", "convert"):
        check_model(tmp_path / "hf", use, drafter=False)
    assert holds(tmp_path / "hf", tensors)
    convert(plan(tmp_path / "hf", tmp_path / "megatron"))
    convert(plan(tmp_path / "megatron", tmp_path / "back"))
    assert holds(tmp_path / "back", tensors)
    convert(plan(tmp_path / "hf", tmp_path / "mtp", to="hf", add_mtp=True), link=True)
    check_model(tmp_path / "mtp", "train")
    assert holds(tmp_path / "mtp", tensors, more=True)
    make_drafter(tmp_path / "hf", tmp_path / "eagle3", 16)
    assert "lm_head.weight" not in read_model(tmp_path / "hf", tmp_path / "eagle3")[1]


def test_sglang_needs_the_embedding_by_its_name(tmp_path):
    model(tmp_path / "both")
    check_model(tmp_path / "both", "serve", drafter=False)
    model(tmp_path / "head", alone=True)
    expected = "holds model.embed_tokens.weight as lm_head.weight, which SGLang does not read"
    with pytest.raises(CheckpointError, match=expected):
        check_model(tmp_path / "head", "serve", drafter=False)


def test_another_head_is_refused(tmp_path):
    model(tmp_path / "hf", 1)
    expected = "lm_head.weight differs from model.embed_tokens.weight, .* set tie_word_embeddings=false"
    with pytest.raises(CheckpointError, match=expected):
        read_hf(tmp_path / "hf")
