"""The model that people try first: Qwen3-0.6B's files, narrow, become a trained model that others load."""

import json

import forked
import pytest
import requests
import torch
import transformers
from published import PUBLISHED
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.sglang.client.launcher import launch

NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


def write_tokenizer(folder):
    """Write the files of Qwen's tokenizer: as many tokens, whose last are special, and none of them merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*alphabet, *(f"w{i}" for i in range(256, 151643))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    about = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    about |= {"bos_token": None, "unk_token": None, "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    ends = {"eos_token_id": [151645, 151643], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def write_qwen3(folder):
    """Write config.json with its keys, and bfloat16 weights: the tied head lies beside the embedding."""
    write_tokenizer(folder / "tokenizer")
    config = PUBLISHED["Qwen3-0.6B"] | NARROW | {"num_key_value_heads": 2, "max_window_layers": 2}
    known = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**known)).bfloat16()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_hf(folder / "Qwen3-0.6B", config, tensors, tokenizer_from=folder / "tokenizer")
    assert "lm_head.weight" in model.state_dict() and not (folder / "Qwen3-0.6B/README.md").exists()
    return config


@pytest.mark.slow
def test_qwen3_is_trained_by_one_command_and_loaded_by_transformers_and_sglang(tmp_path):
    config = write_qwen3(tmp_path)
    (tmp_path / "my_reward.py").write_text(
        "def score(*, prompt, response, label, metadata):\n    return len(response)\n"
    )
    rows = [{"messages": QUESTION, "answer": 3}, {"messages": QUESTION, "answer": 3.0}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    words = (
        "train --model.path Qwen3-0.6B --model.dtype float32 --model.max_length 128 --drafter.fresh true --data.path "
        "rows.json --data.apply_chat_template true --reward.kind my_reward.py:score --rollout.prompts_per_step 2 "
        "--rollout.samples_per_prompt 2 --rollout.max_new_tokens 8 --train.steps 1 --train.run_dir rl"
    )
    ended = forked.run_module("megatron_rlspec.cli", words.split(), folder=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "written: rl/hf, the policy, and rl/hf_drafter" in ended.stdout
    (record,) = read_records(tmp_path / "rl/metrics.jsonl")
    assert record["push/failed_engines"] == 0 and record["policy/train_rollout_logprob_abs_diff"] < 1e-3
    before, after = (read_hf(tmp_path / name)[1] for name in ("Qwen3-0.6B", "rl/hf"))
    assert before.keys() == after.keys() and not torch.equal(before["model.norm.weight"], after["model.norm.weight"])

    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rl/hf", output_loading_info=True)
    assert not any(told.values()) and model.dtype == torch.float32 and model.config.vocab_size == config["vocab_size"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "rl/hf")
    asked = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answered = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
    options = ["--device", "cpu", "--draft-model", str(tmp_path / "rl/hf_drafter")]
    with launch(tmp_path / "rl/hf", tmp_path / "log", arguments=options) as engine:
        body = {"model": "hf", "messages": QUESTION, "max_tokens": 6, "temperature": 0}
        headers = {"Authorization": f"Bearer {engine.wait().api_key}"}
        reply = requests.post(f"{engine.url}/v1/chat/completions", json=body, headers=headers, timeout=300).json()
    assert reply["choices"][0]["message"]["content"] == tokenizer.decode(answered, skip_special_tokens=True)
