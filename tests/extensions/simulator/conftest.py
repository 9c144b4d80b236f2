"""The simulator's acceptance is fitted by `benchmarks/fit_acceptance.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
