"""Several ranks are started here as in the tests of `train`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "train"))
