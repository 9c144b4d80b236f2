"""A directory of an EAGLE-3 drafter is compared with its target: one line for everything that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_eagle3
import torch

from megatron_rlspec.weights.draft_model import read_draft_model, tap_layers
from megatron_rlspec.weights.model_config import ModelConfigError

TARGET = tiny_eagle3.target_config()


def listed(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


def test_what_a_run_needs_to_know_is_read(tmp_path):
    tensors = tiny_eagle3.drafter_weights(tiny_eagle3.drafter_config())
    tiny_eagle3.write(tmp_path, tiny_eagle3.drafter_config(), tensors)
    found = read_draft_model(tmp_path, TARGET, "train")
    assert found.taps == (2, 4, 5) and found.words == tiny_eagle3.WORDS
    assert np.array_equal(found.ids, torch.nonzero(tensors["t2d"])[:, 0].numpy())


@pytest.mark.parametrize(
    ("layers", "config", "taps"),
    [
        (32, {}, (2, 16, 29)),
        (28, {"eagle_config": None}, (2, 14, 25)),
        (8, listed(1, 3, 4), (2, 4, 5)),
        (4, listed(-1, 1, 2), (0, 2, 3)),
    ],
)
def test_layers_are_those_that_sglang_captures(layers, config, taps):
    assert tap_layers(config, layers, "x") == taps


CONFIGS = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "expected \\['LlamaForCausalLMEagle3'\\]"),
    "hidden size": ({"hidden_size": 128}, "hidden_size=128: the target's is 64"),
    "target's hidden size": ({"target_hidden_size": 128}, "target_hidden_size=128: the target's is 64"),
    "vocabulary": ({"vocab_size": 200}, "vocab_size=200: the target's is 160"),
    "too many words": ({"draft_vocab_size": 161}, "draft_vocab_size=161: expected 1 to vocab_size=160"),
    "other words": ({"draft_vocab_size": 100}, "lm_head.weight has shape \\[120, 64\\], expected \\[100, 64\\]"),
    "taps beyond the target": (listed(2, 4, 7), "layer_ids=\\[2, 4, 7\\]: expected .* from 0 to 6"),
    "one tap twice": (listed(2, 2, 4), "expected different layers in ascending order"),
    "taps in another order": (listed(4, 2, 1), "expected different layers in ascending order"),
    "four taps": (listed(0, 1, 2, 3), "fc.weight has shape \\[64, 192\\], expected \\[64, 256\\]"),
    "taps are words": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}}, "expected a list of layers"),
    "the last state alone": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: expected true"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers=2: expected 1"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings=true: expected false"),
    "unknown norm": ({"fc_norm": True}, "fc_norm=true: unknown to LlamaForCausalLMEagle3"),
    "no MLP": ({"intermediate_size": None}, "intermediate_size"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_does_not_fit_is_refused_in_one_line(case, tmp_path):
    change, expected = CONFIGS[case]
    weights = tiny_eagle3.drafter_weights(tiny_eagle3.drafter_config())
    tiny_eagle3.write(tmp_path, tiny_eagle3.drafter_config(**change), weights)
    with pytest.raises(ModelConfigError, match=expected) as refused:
        read_draft_model(tmp_path, TARGET, "train")
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


def test_serving_takes_what_only_sglang_has(tmp_path):
    config = tiny_eagle3.drafter_config(fc_norm=True, rope_scaling={"rope_type": "linear", "factor": 2.0})
    tiny_eagle3.write(tmp_path, config, tiny_eagle3.drafter_weights(config))
    read_draft_model(tmp_path, TARGET, "serve")


def test_sglangs_choice_needs_a_deep_target(tmp_path):
    tiny_eagle3.write(tmp_path, tiny_eagle3.drafter_config(), tiny_eagle3.drafter_weights(tiny_eagle3.drafter_config()))
    with pytest.raises(
        ModelConfigError, match=r"no eagle_config.eagle_aux\S+, so SGLang's \[2, 2, 1\] for a target of 4"
    ):
        read_draft_model(tmp_path, tiny_eagle3.target_config(num_hidden_layers=4), "train")


def without(name):
    return lambda tensors: tensors.pop(name)


def mapped(ids, vocab=tiny_eagle3.VOCAB):
    return lambda tensors: tensors.update(tiny_eagle3.maps(torch.as_tensor(ids), vocab))


FULL = torch.arange(tiny_eagle3.WORDS)
TENSORS = {
    "no fc": (without("fc.weight"), "lacks fc.weight of an EAGLE-3 drafter"),
    "no map": (without("d2t"), "lacks d2t"),
    "half a map": (mapped(FULL[:60]), r"d2t has shape \[60\], expected \[120\]"),
    "one word twice": (mapped(FULL // 2), "must be 120 different tokens"),
    "beyond the vocabulary": (lambda t: t["d2t"].add_(100), "below vocab_size=160"),
    "numbers": (lambda t: t.update(d2t=t["d2t"].float()), "d2t is float32"),
    "marks of other words": (lambda t: t.update(t2d=~t["t2d"]), "t2d marks other tokens"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_in_one_line(case, tmp_path):
    change, expected = TENSORS[case]
    tensors = tiny_eagle3.drafter_weights(tiny_eagle3.drafter_config())
    change(tensors)
    tiny_eagle3.write(tmp_path, tiny_eagle3.drafter_config(), tensors)
    with pytest.raises(ModelConfigError, match=expected):
        read_draft_model(tmp_path, TARGET, "train")


def test_missing_directories_and_files(tmp_path):
    with pytest.raises(ModelConfigError, match="no such directory"):
        read_draft_model(tmp_path / "nowhere", TARGET, "train")
    (tmp_path / "pytorch_model.bin").touch()
    tiny_eagle3.write(tmp_path, tiny_eagle3.drafter_config(), {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelConfigError, match="neither model.safetensors nor"):
        read_draft_model(tmp_path, TARGET, "train")
