"""Run `rlspec` with costs of rounds that no clock corrects, so that no choice depends on how fast a machine is.

With RIDGE in the environment, a pass over so many tokens computes as long as it reads the weights: as many drafts and
samples are worth it as on a machine with many weights.
"""

import os

from megatron_rlspec import cli
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule

SpecRule.timed = lambda *_, **__: None
if "RIDGE" in os.environ:
    Roofline.of_model = lambda *_, **__: Roofline.of_layers(8, float(os.environ["RIDGE"]))
cli.main()
