"""benchmarks/round_costs.py on embedded engines, and what `tail.tp` reads of it (SGLang: test_gpu_session.py)."""

import pytest
import tiny_mimo
import torch
from round_costs import main

from megatron_rlspec.extensions.migration.plans import round_costs
from megatron_rlspec.types import OFF, SpecConfig


@pytest.mark.parametrize("sizes", ["1", pytest.param("1,2", marks=pytest.mark.slow)])
def test_rounds_of_embedded_engines_are_measured_and_read(tmp_path, sizes):
    torch.set_num_threads(1)
    shape = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=160)
    model = tiny_mimo.write(tmp_path / "tiny", shape, tiny_mimo.weights(shape))
    path = tmp_path / "sizes.json"
    points = ["--steps", "1,3", "--batches", "1,2", "--lengths", "16", "--seconds", "0"]
    assert main([str(path), "--model", str(model), "--tp", sizes, *points]) == 0
    found = round_costs.read(path, map(int, sizes.split(",")))
    for costs in found.values():
        assert costs.configs() == (OFF, SpecConfig(1), SpecConfig(3)) and costs.prefill_ms(16) > 0
