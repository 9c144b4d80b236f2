"""The first push of examples/torchrun/glm-4.5-air.sh, with its real shapes and without its data.

The trainer's names and shapes are read from Megatron's modules, the engine's from SGLang's, each on the meta device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import PUBLISHED

from megatron_rlspec.config import load
from megatron_rlspec.rollout.sglang.bucket_checks import ServedTensors
from megatron_rlspec.train import shards, stages

RECIPE = Path(__file__).parents[2] / "examples/torchrun/glm-4.5-air.toml"
GLM = PUBLISHED["GLM-4.5-Air"]


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
