"""What FlashInfer's planner is told, with SGLang's own planning and a planner that keeps its arguments."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.scheduler import flashinfer_plans

pytestmark = pytest.mark.usefixtures("sglang_models")


def prefill_wrapper(module, in_graph=True):
    """Return what `fast_prefill_plan` reads and writes of FlashInfer's wrapper of paged attention, for 2 requests."""
    buffer = torch.zeros(64, dtype=torch.int32)
    return SimpleNamespace(
        is_cuda_graph_enabled=in_graph,
        device=torch.device("cpu"),
        _backend="fa2",
        _cached_module=module,
        _max_total_num_rows=None,
        _qo_indptr_buf=torch.zeros(3, dtype=torch.int32),
        _paged_kv_indptr_buf=torch.zeros(3, dtype=torch.int32),
        _paged_kv_last_page_len_buf=torch.zeros(2, dtype=torch.int32),
        _paged_kv_indices_buf=buffer,
        _float_workspace_buffer=buffer,
        _int_workspace_buffer=buffer,
        _pin_memory_int_workspace_buffer=buffer,
    )


def sglangs_plan(wrapper, rows):
    """Plan with SGLang's `fast_prefill_plan`: `rows` of each of 2 requests, after 5 and 7 tokens."""
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    lengths = torch.tensor([5, 7], dtype=torch.int32) + rows
    starts = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
    kv_starts = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
    fast_prefill_plan(
        wrapper,
        starts,
        kv_starts,
        torch.arange(int(lengths.sum()), dtype=torch.int32),
        torch.ones(2, dtype=torch.int32),
        32,
        8,
        128,
        1,
        qo_indptr_host=starts,
        kv_indptr_host=kv_starts,
        kv_lens_host=lengths,
        max_q_len=rows,
        max_kv_len=int(lengths.max()),
    )


def planned(backend="fa2"):
    """Return a promise, the module that FlashInfer's look-up returns, and the arguments of its plans."""
    plans = []

    def plan(*args):
        plans.append(args)
        return ["a plan"]

    module = SimpleNamespace(plan=plan)
    promise = flashinfer_plans.Promise()
    for _ in range(2):  # FlashInfer caches the module
        assert promise.planned(lambda *_: module, backend, "bfloat16") is module
    return promise, module, plans


@pytest.mark.parametrize("rows", [1, 4])
def test_a_round_of_drafts_promises_its_rows_and_other_passes_promise_nothing(rows):
    """A graph of prefills gets uneven requests, even if it was captured with equal ones."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    promise, module, plans = planned()
    wrapper = prefill_wrapper(module)
    for round_ in (object.__new__(EagleVerifyInput), None):
        promise.in_rounds(lambda *_: sglangs_plan(wrapper, rows), "updater", "ragged", wrapper, round_)
    sglangs_plan(wrapper, rows)
    assert [args[-1] for args in plans] == [rows, 0, 0] and wrapper._plan_info == ["a plan"]


def test_without_a_graph_or_by_another_backend_nothing_changes():
    promise, module, plans = planned()
    promise.holds = True
    module.plan(*range(11), False, *range(12, 19), 0)
    module.plan(*range(16))  # FA3's planner has no such argument
    assert plans[0][-1] == 0 and plans[1] == tuple(range(16))
    promise, module, plans = planned("fa3")
    promise.holds = True
    module.plan(*range(19), 0)
    assert plans[0][-1] == 0


def test_hooks_are_there_where_flashinfer_is(monkeypatch):
    for name in flashinfer_plans.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flashinfer_plans, "locate", lambda name: None)
    assert list(flashinfer_plans.hooks()) == [] and not set(flashinfer_plans.SWITCHES) & set(os.environ)

    monkeypatch.setenv(flashinfer_plans.SWITCHES[0], "0")
    monkeypatch.setattr(flashinfer_plans, "locate", lambda name: name)
    assert [target for target, _, _ in flashinfer_plans.hooks()] == [flashinfer_plans.PLAN, flashinfer_plans.MODULE]
    assert [os.environ[name] for name in flashinfer_plans.SWITCHES] == ["0", "1"]
