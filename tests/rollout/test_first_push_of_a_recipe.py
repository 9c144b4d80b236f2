"""The first push of examples/torchrun/glm-4.5-air.sh, with its real shapes and without its data.

The trainer's names and shapes are read from Megatron's modules, the engine's from SGLang's, each on the meta device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rlspec.config import load
from megatron_rlspec.rollout.sglang.bucket_checks import ServedTensors
from megatron_rlspec.train import shards, stages

RECIPE = Path(__file__).parents[2] / "examples/torchrun/glm-4.5-air.toml"
# config.json of zai-org/GLM-4.5-Air, without what says nothing of sizes.
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "torch_dtype": "bfloat16",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def trainers_tensors(monkeypatch) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that all pipeline stages export, as `shards.export` does."""
    found: dict[str, tuple[int, ...]] = {}
    count = stages._count

    def noted(table, module, config):
        for name, tensor in shards.global_names(module, config).items():
            shape, dtype = shards._full_shape(table, name, tensor, config.tensor_model_parallel_size)
            full = torch.empty(shape, dtype=dtype, device="meta")
            for hf, part in table.to_hf(name, full):
                found[hf] = tuple(part.shape)
        return count(table, module, config)

    monkeypatch.setattr(stages, "_count", noted)
    config = load(RECIPE)
    assert (config.parallel.tensor, config.parallel.pipeline) == (8, 2)
    stages.build(config, GLM, 64)
    return found


@pytest.mark.slow
def test_sglang_holds_what_the_trainer_exports(sglang_models, monkeypatch, tmp_path):
    sent = trainers_tensors(monkeypatch)
    block = 9  # two norms, q, k and v with biases, o
    experts = 3 * 128 + 3 + 2  # routed, shared, the router and its bias
    assert len(sent) == 3 + 46 * block + 3 + 45 * experts + 4 + block + experts
    for rank in sglang_models.engine(GLM, tmp_path, 8, device="meta", fused=1, only=(0, 7)):
        held = rank.held()
        shapes = {part.name: list(part.shape) for part in held}
        served = ServedTensors(shapes, frozenset(part.name for part in held if part.drafter))
        assert shapes.keys() == sent.keys()
        for name, shape in sent.items():
            served.check(name, shape, "all")
        for part in held:  # fingerprints of parts need whole words
            row = part.part[0].numel() * part.part.element_size() if part.dim else 0
            start = part.first * part.part[0].numel() * part.part.element_size() if not part.dim else 0
            assert row % 8 == 0 and start % 8 == 0, part.name
