"""Every family whose record says `embedded`: the embedded engine's log-probs are Transformers', drafts or not."""

import pytest
import torch
from test_model_parity import LLAMA3, YARN
from test_pushed_families import checkpoint, config_of
from test_served_families import agrees_with_transformers, drawn

from megatron_rlspec.models.families import names_where
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.types import OFF, SpecConfig

EMBEDDED = {name: config_of(name, eos_token_id=2) for name in names_where(lambda record: record.embedded)}
EMBEDDED["LlamaForCausalLM 3.1"] = config_of("LlamaForCausalLM", eos_token_id=2, rope_scaling=LLAMA3)
EMBEDDED["Qwen2ForCausalLM YaRN"] = config_of("Qwen2ForCausalLM", eos_token_id=2, rope_scaling=YARN)
EMBEDDED["MiMoForCausalLM of a Llama"] = config_of("MiMoForCausalLM", attention_bias=False, eos_token_id=2)


@pytest.mark.parametrize("model", EMBEDDED)
def test_log_probs_are_those_of_transformers(model, tmp_path):
    config = EMBEDDED[model]
    tensors = checkpoint(config, tmp_path / "names")
    drafts = config["num_nextn_predict_layers"] > 0
    spec = SpecConfig(3) if drafts else OFF
    engine = EmbeddedEngine(config, tensors.items(), dtype=torch.float32, device="cpu", config=spec)
    samples = drawn(engine)
    agrees_with_transformers(samples, config, tensors, tmp_path / "oracle")
    assert {str(found.config) for found in engine.stats()} == {"k3" if drafts else "off"}
