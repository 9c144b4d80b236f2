"""Fixtures that whole runs start from, and the order in which pytest-xdist's workers take the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import short_run
from hypothesis import HealthCheck, settings

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")  # no case depends on how fast a machine is
# Before torch is imported, and for all processes that tests start: whole runs are compared bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"
TESTS = Path(__file__).parent
# A long file at the end would leave the other worker idle. Files that are not listed follow in their usual order.
LONGEST = (
    "rollout/test_sglang_engine.py",
    "run/test_run.py",
    "train/test_parallel_equality.py",
    "tasks/test_rewards.py",
    "extensions/drafter_schedules/test_online.py",
    "run/test_trajectory.py",
    "run/test_checkpoints.py",
    "rollout_embedded/test_lossless_equality.py",
    "train/test_resume.py",
    "rollout_embedded/test_lossless_statistical.py",
    "rollout_embedded/test_coupled.py",
    "train/test_model_parity.py",
    "train/test_dry_run.py",
    "train/test_isolation.py",
    "train/test_experts.py",
    "train/test_expert_parallel.py",
    "train/test_eagle3_training.py",
    "train/test_latent.py",
    # the slow tier
    "run/test_killed.py",
    "run/test_fresh_run.py",
    "parity/test_draft_logits.py",
    "parity/test_eagle3_engine.py",
    "run/test_lost_engines.py",
    "run/test_interrupted.py",
    "rollout/test_engine_ends.py",
    "rollout/test_http_clients.py",
    "rollout/test_sglang_overlap.py",
    "run/test_parallel_run.py",
)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after each file: a job in this process leaves RANK, WORLD_SIZE and MASTER_PORT there."""
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a task and a small random model. Tests of whole runs start from them and do not change them."""
    return short_run.make_start(tmp_path_factory.mktemp("start"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first. Workers take whole files (--dist loadfile): fixtures start engines and jobs."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(LONGEST)))
