"""The table of faults and of the detectors that fired, printed after the tests."""

import pytest

FIRED = pytest.StashKey[dict[str, dict[str, list[str]]]]()


@pytest.fixture
def fired(request) -> dict[str, list[str]]:
    """Fault -> detectors that fired, in order; one table per test module."""
    return request.config.stash.setdefault(FIRED, {}).setdefault(request.module.__name__, {})


def pytest_terminal_summary(terminalreporter, config):
    for module, found in config.stash.get(FIRED, {}).items():
        terminalreporter.section(f"{module}: detectors that fired, in order")
        for name, detectors in found.items():
            terminalreporter.write_line(f"{name:60} {', '.join(detectors) or 'NONE'}")
