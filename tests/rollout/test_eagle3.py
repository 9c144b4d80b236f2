"""EAGLE-3 in SGLang without an engine: which loader takes what, at every tensor-parallel size, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_eagle3
import tiny_mimo
from test_pushed_families import checkpoint, config_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.rollout.sglang.scheduler import control, versions
from megatron_rlspec.run.inputs import check_inputs
from megatron_rlspec.tasks.order import DataError

TARGETS = versions.EAGLE3_TARGETS
DRAFTER = tiny_eagle3.drafter_config()
OWN = tiny_eagle3.drafter_weights(DRAFTER)


def configured(config: dict[str, Any]) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: dict(config))))


def test_drafters_names_are_known_where_weights_cannot_be_read():
    """As of a quantised target: pushes are then checked by what each loader was given."""
    worker = SimpleNamespace(
        speculative_algorithm=SimpleNamespace(is_eagle3=lambda: True), draft_runner=configured(DRAFTER)
    )
    scheduler = configured(tiny_eagle3.target_config())
    scheduler.draft_worker = SimpleNamespace(draft_worker=worker)
    assert set(control._drafter_names(scheduler)) == set(tiny_eagle3.pushed(OWN))
    scheduler.draft_worker = None
    assert control._drafter_names(scheduler) == []


def slow_unless_llama(name: str) -> Any:
    return pytest.param(name, marks=[] if name == "LlamaForCausalLM" else [pytest.mark.slow])


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", [slow_unless_llama(name) for name in TARGETS])
def test_every_pushed_byte_is_in_the_right_place(sglang_models, architecture, tp, tmp_path):
    """Both loaders get all tensors in one call, as of a bucket. The drafter's heads and words are split, too."""
    config = config_of(architecture, vocab_size=tiny_eagle3.VOCAB)
    drafter = tiny_eagle3.drafter_config(num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    own = tiny_eagle3.drafter_weights(drafter)
    tensors = checkpoint(config, tmp_path / "checkpoint") | tiny_eagle3.pushed(own)
    ranks = sglang_models.engine(config, tmp_path / "engine", tp, eagle3_config=drafter)
    for rank in ranks:
        held = {part.name: (part.shape, part.drafter) for part in rank.held()}
        assert held == {name: (tuple(t.shape), name.startswith("eagle3.")) for name, t in tensors.items()}
        rank.load(tensors)
    assert sglang_models.fingerprints(ranks) == sglang_models.expected(tensors)
    for rank in ranks:  # in the other order, and a target alone
        rank.load(dict(reversed({name: tensor + 1 for name, tensor in tensors.items()}.items())))
        rank.load({name: tensor for name, tensor in tensors.items() if not name.startswith("eagle3.")})
    found = sglang_models.fingerprints(ranks)
    wanted = {name: tensor + name.startswith("eagle3.") for name, tensor in tensors.items()}
    assert found == sglang_models.expected(wanted)


def test_a_run_with_such_a_target_is_refused_before_anything_starts(tmp_path):
    config = tiny_mimo.config(hidden=64, layers=8, heads=4, kv_heads=2, ffn=128, vocab=160)
    model = tiny_eagle3.write(tmp_path / "model", config, tiny_mimo.weights(config))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    path = tiny_eagle3.write(tmp_path / "drafter", DRAFTER, OWN)
    options = {
        "model.path": str(model),
        "drafter.kind": "eagle3",
        "drafter.path": str(path),
        "model.max_length": "2048",
    }
    with pytest.raises(
        ConfigError, match="drafter.kind=eagle3: SGLang's MiMoForCausalLM is not known to give an EAGLE-3"
    ):
        check_inputs(load(None, options), "train")
    # The embedded engine takes it, and the next check is of the prompts.
    with pytest.raises(DataError, match="a directory; expected files"):
        check_inputs(load(None, options | {"rollout.engine": "embedded"}), "train")
