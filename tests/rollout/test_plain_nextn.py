"""SGLang's own server, without this package's plugin, takes a Llama with a drafter by its NEXTN algorithm."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_pushed_families import checkpoint, config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.models.hf_files import write_hf

SERVER = Path(__file__).parent.parent.parent / "examples/smollm2/plain_server.py"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate([*alphabet, "<|end|>"])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.mark.slow
def test_sglangs_own_server_takes_the_directory(tmp_path):
    sizes = {"head_dim": 8, "vocab_size": 257, "eos_token_id": 256}  # SGLang on a CPU: head_dim is hidden_size / heads
    config = config_of("LlamaForCausalLM", tie_word_embeddings=True, **sizes)
    write_hf(tmp_path / "llama", config, checkpoint(config, tmp_path / "names"))
    tokenizer().save_pretrained(tmp_path / "llama")
    convert(plan(tmp_path / "llama", tmp_path / "model", add_mtp=True, to="hf"))
    ended = subprocess.run(
        [sys.executable, str(SERVER), str(tmp_path / "model")], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "NEXTN with 3 drafts: 'Ask one question about a garden.' -> " in ended.stdout
    found = re.search(r"64 tokens in (\d+) rounds", ended.stdout)
    assert found and 16 <= int(found[1]) <= 64
