"""benchmarks/staleness.py: how several processes share its jobs."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/staleness.py"


@pytest.fixture(scope="module")
def staleness() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("staleness")


def test_workers_make_each_job_once_after_what_it_needs_and_go_on_after_a_failure(
    staleness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def job(name: str, *needs: str, fails: bool = False) -> object:
        def make() -> None:
            time.sleep(0.01)
            made.append(name)
            if fails:
                raise RuntimeError("out of luck")
            (tmp_path / name).touch()

        lock = tmp_path / "locks" / name
        return staleness.Job(name, lock, tmp_path / name, [tmp_path / need for need in needs], make)

    monkeypatch.setattr(staleness.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    jobs = [job("table", "a", "b"), job("broken", fails=True), *(job(name) for name in "abcdef")]
    with ThreadPoolExecutor(2) as pool:  # a lock belongs to an open file, so threads exclude each other, too
        workers = [pool.submit(staleness.work_off, jobs, time.monotonic() + 60) for _ in range(2)]
    assert [worker.exception() for worker in workers] == [None, None]
    assert made.count("broken") == 2, "once by each worker"
    assert sorted(name for name in made if name != "broken") == [*"abcdef", "table"]
    assert made.index("table") > max(made.index("a"), made.index("b"))
    late = job("late")
    staleness.work_off([late], time.monotonic() - 1)
    assert not late.made.exists()


def test_variants_that_differ_in_one_thing_come_first(staleness: ModuleType) -> None:
    names = [variant.name for variant in staleness.variants(quick=False)]
    assert names[0] == staleness.BASE.name and len(set(names)) == len(names)
    single = len(staleness.SCHEDULES) - 1 + len(staleness.LOSSES) - 1 + len(staleness.RATES) - 1
    single += len(staleness.MORE_RATES)
    for variant in staleness.variants(quick=False)[1 : single + 1]:
        same = (variant.schedule == "every step", variant.loss == "ce", variant.rate == "1e-3")
        assert sum(same) == 2, variant
