"""Print the table of faults and of the detectors that fired, after the tests."""

from __future__ import annotations

import pytest

Fired = dict[str, dict[str, list[str]]]  # module -> fault -> detectors, in order
FIRED = pytest.StashKey[Fired]()


def table(config: pytest.Config) -> Fired:
    return config.stash.setdefault(FIRED, {})


@pytest.fixture
def fired(request) -> dict[str, list[str]]:
    """Map faults to the detectors that fired, in order; one table per test module."""
    return table(request.config).setdefault(request.module.__name__, {})


def pytest_sessionfinish(session):
    """A worker of pytest-xdist sends its tables to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fired"] = table(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for module, found in getattr(node, "workeroutput", {}).get("fired", {}).items():
        table(node.config).setdefault(module, {}).update(found)


def pytest_terminal_summary(terminalreporter, config):
    for module, found in table(config).items():
        terminalreporter.section(f"{module}: detectors that fired, in order")
        for name, detectors in found.items():
            terminalreporter.write_line(f"{name:60} {', '.join(detectors) or 'NONE'}")
