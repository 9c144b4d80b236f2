"""tools/gguf_to_hf.py: a GGUF file that the test writes, as llama.cpp's converter does, becomes a model of ours."""

import runpy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_pushed_families import checkpoint, config_of

from megatron_rlspec.commands.convert import main as convert
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.tasks.data import load_tokenizer

to_hf = runpy.run_path(str(Path(__file__).parent.parent / "tools/gguf_to_hf.py"))["main"]
WORDS = ["<|end|>", *(chr(97 + i) for i in range(26)), "Ġ", "ab", "abc"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return config.json and tensors of a Llama with a tied head."""
    config = config_of("LlamaForCausalLM", vocab_size=len(WORDS), head_dim=8, tie_word_embeddings=True)
    tensors = checkpoint(config, tmp_path_factory.mktemp("names"))
    return config, {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}


def write(path, config, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(20000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] + [1] * (len(WORDS) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        array = tensor.numpy()
        if part in heads:  # llama.cpp makes neighbours of the channels i and i + D/2 of a head
            pairs = array.reshape(heads[part], 2, -1, array.shape[-1])
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        theirs = f"blk.{layer}.{NAMES[part]}" if layer.isdigit() else NAMES.get(stem, stem)
        writer.add_tensor(f"{theirs}.{leaf}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_file_becomes_a_model(model, tmp_path):
    config, tensors = model
    file = write(tmp_path / "m.gguf", config, tensors)
    to_hf([file, str(tmp_path / "hf"), "--dtype", "float32"])
    found, lazy = read_hf(tmp_path / "hf")
    assert found["dtype"] == "float32" and found["tie_word_embeddings"]
    assert found["rope_parameters"]["rope_theta"] == 20000.0
    assert set(lazy) == set(tensors)
    assert all(torch.equal(lazy[name], tensor) for name, tensor in tensors.items())
    tokenizer = load_tokenizer(tmp_path / "hf")
    assert tokenizer("abcx")["input_ids"] == [WORDS.index("abc"), WORDS.index("x")]
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, "<|end|>")
    assert convert([str(tmp_path / "hf"), str(tmp_path / "drafted"), "--add-mtp", "--to", "hf"]) == 0
    check_model(tmp_path / "drafted", "convert")


def test_tensors_that_transformers_would_ignore_are_refused(model, tmp_path, capsys):
    config, tensors = model
    file = write(tmp_path / "m.gguf", config, {**tensors, "rope_freqs.weight": tensors["model.norm.weight"]})
    with pytest.raises(SystemExit):
        to_hf([file, str(tmp_path / "hf")])
    assert "holds tensors that have no place in LlamaForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
