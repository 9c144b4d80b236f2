"""Prints how many rounds the simulator makes in a CPU second: run this file with `pytest -s -m slow`."""

import time

import numpy as np
import pytest

from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel

TABLE = hardware_table("H100", ModelSizes(), (1,))
ACCEPTANCE = AcceptanceModel(np.array([[0.9, 0.85, 0.8], [0.5, 0.4, 0.3]]), 0.8, np.array([0.4, 0.6, 0.8]))
LONG = LengthModel.of_quantiles((0.5, 2000), (0.95, 12000), 0.5)
SHORT = LengthModel.of_quantiles((0.5, 378), (0.95, 1373), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "engines", "prompts", "lengths", "cap"),
    [
        ("adaptive", 8, 16, LONG, 16384),
        ("adaptive+auto", 8, 16, LONG, 16384),
        ("adaptive", 1000, 1000, SHORT, 2048),
        ("adaptive+auto", 1000, 1000, SHORT, 2048),
    ],
)
def test_rounds_a_cpu_second(policies, engines, prompts, lengths, cap):
    work = Workload(lengths, ACCEPTANCE, prompts, 8, 256, cap)
    began = time.process_time()
    trace = Simulation(Cluster(TABLE, engines), work, Policies.of(policies), 0).run()
    took = time.process_time() - began
    print(f"\n{policies}, {engines} engines: {trace.rounds} rounds in {took:.2f} CPU s, {trace.rounds / took:.0f} a s")
    assert trace.rounds > engines
