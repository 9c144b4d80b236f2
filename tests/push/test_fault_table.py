"""The table of faults and detectors in docs/weights.md equals the one that the fault tests assert."""

from pathlib import Path

import test_faults
import test_sglang_faults

DOCS = Path(__file__).parents[2] / "docs/weights.md"


def documented() -> dict[str, tuple[str, bool]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCS.read_text().splitlines() if "|" in line]
    faults = [row for row in rows if row[1:2] and row[1] in ("exporter", "wire", "engine")]
    return {f"{where}: {fault}": (finding, sglang == "yes") for fault, where, finding, sglang in faults}


def test_the_documented_table_is_the_tested_one():
    tested = {n: (detector, n in test_sglang_faults.FAULTS) for n, (_, detector) in test_faults.FAULTS.items()}
    assert documented() == tested
    for name, (_, detector) in test_sglang_faults.FAULTS.items():
        assert test_faults.FAULTS[name][1] == detector
