"""docs/eagle3.md: its commands run in order with a tiny random Qwen3."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from docs_pages import blocks
from test_getting_started import SMALL, stand_in
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rlspec.config import load
from megatron_rlspec.models.hf_files import read_hf, write_hf

PAGE = "eagle3.md"


def test_the_configuration_is_valid(tmp_path):
    (text,) = blocks(PAGE, "toml")
    (tmp_path / "run.toml").write_text(text)
    assert load(tmp_path / "run.toml", {"data.eval_path": "e.jsonl"}).reward.kind == "my_reward:score"


def small_qwen3(folder: Path) -> None:
    """Replace the stand-in's model by a Qwen3 with the same tokenizer."""
    old = json.loads((folder / "my-model/config.json").read_text())
    same = ("vocab_size", "eos_token_id", "max_position_embeddings", "rms_norm_eps")
    config = Qwen3Config(
        **{key: old[key] for key in same},
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    stated = json.loads(config.to_json_string()) | {"rope_theta": 10000.0, "torch_dtype": "float32"}
    write_hf(folder / "qwen3", stated, Qwen3ForCausalLM(config).state_dict(), tokenizer_from=folder / "my-model")
    (folder / "my-model").rename(folder / "qwen2")
    (folder / "qwen3").rename(folder / "my-model")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_run(tmp_path):
    stand_in(tmp_path)
    small_qwen3(tmp_path)
    (text,) = blocks(PAGE, "toml")
    for theirs, small in SMALL.items():
        text = text.replace(theirs, small)
    (tmp_path / "run.toml").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in blocks(PAGE, "bash"):
        command = command.replace("step-000100", "step-000002")
        ended = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, command + ended.stdout[-2000:] + ended.stderr[-3000:]
    assert list((tmp_path / "runs/fresh").glob("start-eagle3-*"))
    ours, theirs = (read_hf(tmp_path / path)[1] for path in ("model_drafter", "runs/rl/hf_drafter"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
