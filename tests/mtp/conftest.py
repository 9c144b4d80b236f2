import pytest
from mtp_ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Two worker processes over gloo."""
    workers = Ranks(2)
    yield workers
    workers.close()
