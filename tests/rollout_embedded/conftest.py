"""The model that most of these files draw from."""

import embedded_oracle as oracle
import pytest


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(drafter="close", sharpness=2.0)
