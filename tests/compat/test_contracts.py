"""What is installed has the names and parameters that this package uses."""

import os

import contracts
import pytest
from sglang_names import CONTRACTS


def test_what_is_installed_keeps_its_contract():
    assert contracts.broken(CONTRACTS["0.5.23"]) is None


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a checkout of slime")
def test_slime_keeps_its_contract():
    assert contracts.broken(contracts.SLIME, contracts.installed([os.environ["RLSPEC_SLIME"]])) is None
