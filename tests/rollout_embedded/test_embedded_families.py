"""Every family whose record says `embedded`: the embedded engine's log-probs are Transformers', drafts or not."""

import pytest
import torch
from test_model_parity import LLAMA3, YARN
from test_pushed_families import checkpoint, config_of
from test_served_families import agrees_with_transformers, drawn

from megatron_rlspec.models.config import HARMLESS, SCHEMAS
from megatron_rlspec.models.families import names_where
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.types import OFF, SpecConfig


def dense(architecture, **changes):
    """Return the config.json of the other families' tests, without what only they have."""
    known = SCHEMAS[architecture].model_fields.keys() | set(HARMLESS)
    return {key: value for key, value in config_of(architecture, **changes).items() if key in known}


EMBEDDED = {name: dense(name, eos_token_id=2) for name in names_where(lambda record: record.embedded)}
EMBEDDED["LlamaForCausalLM 3.1"] = dense("LlamaForCausalLM", eos_token_id=2, rope_scaling=LLAMA3)
EMBEDDED["Qwen2ForCausalLM YaRN"] = dense("Qwen2ForCausalLM", eos_token_id=2, rope_scaling=YARN)
EMBEDDED["MiMoForCausalLM of a Llama"] = dense("MiMoForCausalLM", attention_bias=False, eos_token_id=2)


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
