"""GGUF files that the test writes itself, as llama.cpp's converter does: read as a Hugging Face checkpoint."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from test_pushed_families import checkpoint, config_of

from megatron_rlspec import cli
from megatron_rlspec.commands.convert import main
from megatron_rlspec.config import ConfigError
from megatron_rlspec.models.config import check_config
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.tasks.data import load_tokenizer

WORDS = ["<|end|>", *(chr(97 + i) for i in range(26)), "Ġ", "ab", "abc"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def model(architecture: str, folder, **changes):
    config = config_of(architecture, vocab_size=len(WORDS), tie_word_embeddings=True, **changes)
    tensors = checkpoint(config, folder)
    return config, {name: tensor for name, tensor in tensors.items() if "mtp" not in name and "lm_head" not in name}


def permuted(name: str, array: np.ndarray, config) -> np.ndarray:
    """Order the channels of a head as llama.cpp does for Llama: pairs (i, i + D/2) become neighbours."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}.get(name.split("attn.")[-1][0], 0)
    if not heads or "_proj" not in name:
        return array
    rows = array.reshape(heads, 2, -1, array.shape[-1])
    return np.ascontiguousarray(np.stack([rows[:, 0], rows[:, 1]], 2).reshape(array.shape))


def write(path, config, tensors, arch="llama", kind=Kind.F32, extra=None, lost="", words=WORDS, rope=10000.0, keys=()):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if not any("key_length" in str(key) for key in keys):
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(rope)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for add, *values in keys:
        getattr(writer, add)(*values)
    for name, tensor in {**tensors, **(extra or {})}.items():
        stem, _, leaf = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        theirs = f"blk.{layer}.{NAMES[part]}" if layer.isdigit() else NAMES.get(stem, stem)
        array = tensor.numpy()
        if arch == "llama":
            array = permuted(name, array, config)
        if lost and lost in theirs:
            continue
        if kind != Kind.F32 and array.ndim == 2:
            writer.add_tensor(f"{theirs}.{leaf}", gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{theirs}.{leaf}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_file_becomes_a_checkpoint(architecture, tmp_path):
    config, tensors = model(architecture, tmp_path / "names")
    arch = architecture.removesuffix("ForCausalLM").lower()
    write(tmp_path / "m.gguf", config, tensors, arch)
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    found, lazy = read_hf(tmp_path / "hf")
    assert found["architectures"] == [architecture] and found["tie_word_embeddings"] and found["dtype"] == "float32"
    check_config(found, "the model")
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
        assert found[key] == config[key]
    assert set(lazy) == set(tensors)
    assert all(torch.equal(lazy[name], tensor) for name, tensor in tensors.items())
    tokenizer = load_tokenizer(tmp_path / "hf")
    assert tokenizer("abcx")["input_ids"] == [WORDS.index("abc"), WORDS.index("x")]
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, "<|end|>")


def test_quantised_tensors_are_dequantised_and_the_drafter_added(tmp_path):
    config, tensors = model("LlamaForCausalLM", tmp_path / "names")
    write(tmp_path / "m.gguf", config, tensors, kind=Kind.Q8_0)
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "hf"), "--add-mtp"]) == 0
    found, lazy = read_hf(tmp_path / "hf")
    assert found["architectures"] == ["MiMoForCausalLM"] and found["dtype"] == "bfloat16"
    for name, tensor in tensors.items():
        assert lazy[name].dtype == torch.bfloat16
        torch.testing.assert_close(lazy[name].float(), tensor, atol=0.02, rtol=0.02)
    assert "model.mtp_layers.0.input_proj.weight" in lazy


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    config, tensors = model("LlamaForCausalLM", tmp_path / "names")
    write(tmp_path / "whole.gguf", config, tensors)
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    files = {
        "text.gguf": b"not a model",
        "lost.gguf": {"lost": "blk.1.attn_k"},
        "more.gguf": {"extra": {"blk.0.attn_sinks.weight": norm["model.norm.weight"]}},
        "rope.gguf": {"extra": {"rope_freqs.weight": norm["model.norm.weight"]}},
        "bert.gguf": {"arch": "bert"},
    }
    expected = {
        "text.gguf": "truncated or not GGUF",
        "lost.gguf": "lacks blk.1.attn_k.weight, which LlamaForCausalLM needs",
        "more.gguf": "blk.0.attn_sinks.weight has no place in LlamaForCausalLM",
        "rope.gguf": "scaled rotary embeddings are not read from GGUF",
        "bert.gguf": "general.architecture is bert; expected llama, qwen2, qwen3",
    }
    for name, made in files.items():
        path = tmp_path / name
        if isinstance(made, bytes):
            path.write_bytes(made)
        else:
            write(path, config, tensors, **made)
        capsys.readouterr()
        assert cli.run(lambda path=path: main([str(path), str(tmp_path / "out")])) == 2
        error = capsys.readouterr().err
        assert expected[name] in error and name in error and error.count("\n") == 1, error
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="is no GGUF file"):
        main([str(tmp_path / "names"), str(tmp_path / "out"), "--dtype", "float32"])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    return model("LlamaForCausalLM", folder)


def refused(path, capsys) -> str:
    capsys.readouterr()
    assert cli.run(lambda: main([str(path), str(path.parent / "out")])) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rlspec: {path}: ") or f"of {path}: " in error, error
    assert error.count("\n") == 1 and not (path.parent / "out").exists()
    return error


@pytest.mark.parametrize(
    ("options", "expects"),
    [
        ({"words": [*WORDS, "more"]}, "model.embed_tokens.weight has shape [30, 64], expected [31, 64]"),
        ({"keys": [("add_float32", "llama.swing", 0.5)]}, "llama.swing is 0.5; this key is not read from GGUF"),
        (
            {"keys": [("add_causal_attention", False)]},
            "llama.attention.causal is False; this key is not read from GGUF",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_by_which_llama_cpp_computes_something_else_is_refused(small, options, expects, tmp_path, capsys):
    path = write(tmp_path / "m.gguf", *small, **options)
    assert expects in refused(path, capsys)


def test_neutral_metadata_is_taken(small, tmp_path):
    keys = [
        ("add_rope_dimension_count", 16),
        ("add_value_length", 16),
        ("add_logit_scale", 1.0),
        ("add_expert_count", 0),
    ]
    keys += [
        ("add_string", "general.license", "mit"),
        ("add_string", "maker.note", "x"),
        ("add_causal_attention", True),
    ]
    path = write(tmp_path / "m.gguf", *small, keys=keys)
    assert main([str(path), str(tmp_path / "out")]) == 0


def test_values_that_are_not_finite_are_refused(small, tmp_path, capsys):
    config, tensors = small
    spoilt = {**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], torch.nan)}
    path = write(tmp_path / "m.gguf", config, spoilt)
    assert "model.norm.weight holds NaN or infinite values" in refused(path, capsys)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_file_that_ends_early_is_refused(small, share, tmp_path, capsys):
    """In its metadata, in its list of tensors, and in its tensors."""
    path = write(tmp_path / "m.gguf", *small)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert "truncated or not GGUF" in refused(path, capsys)
