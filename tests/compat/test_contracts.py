"""A checkout of slime has the names and parameters that this package uses."""

import os

import contracts
import pytest


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a checkout of slime")
def test_slime_keeps_its_contract():
    assert contracts.broken(contracts.SLIME, contracts.installed([os.environ["RLSPEC_SLIME"]])) is None
