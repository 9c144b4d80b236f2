"""Write the simulated cost tables of this directory: rooflines from vendors' figures, without engine and noise.

PYTHONPATH=benchmarks python examples/cost_tables/simulate.py
"""

from pathlib import Path

from roofline_tables import roofline_table

from megatron_rlspec.speculation.cost_table import Provenance
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.solver import chains

for name in ("H20", "H100", "H200"):
    provenance = Provenance(
        model="7B, 36 layers, one MTP layer",
        hardware=name,
        dtype="bfloat16",
        engine="roofline",
        engine_version="1",
        date="-",
        simulated=True,
        note="vendor's dense figures, 80 % of bandwidth, 60 % of arithmetic, 1.5 ms host, 0.2 ms a drafter "
        "pass, 4.5 us to sample a token at 3.35 TB/s",
    )
    table = roofline_table(
        Roofline.of_hardware(*HARDWARE[name]),
        chains((0, 1, 2, 3, 5)),
        (1, 4, 16, 64, 256),
        (128, 1024, 8192),
        provenance,
    )
    table.save(Path(__file__).parent / f"{name.lower()}-simulated.json")
