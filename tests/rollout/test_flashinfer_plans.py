"""What FlashInfer's planner is told, with SGLang's own planning and a planner that keeps its arguments."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.scheduler import flashinfer_plans

pytestmark = pytest.mark.usefixtures("sglang_models")


class Kept:
    """Keeps the arguments of the last plan."""

    def __call__(self, *args):
        self.args = args
        return ["a plan"]


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


def round_of_drafts():
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    return object.__new__(EagleVerifyInput)


def planned(backend="fa2"):
    """Return a promise, the module that FlashInfer's look-up returns, and the planner below it."""
    kept = Kept()
    module = SimpleNamespace(plan=kept)
    promise = flashinfer_plans.Promise()
    for _ in range(2):  # FlashInfer caches the module
        assert promise.planned(lambda *_: module, backend, "bfloat16") is module
    return promise, module, kept


@pytest.mark.parametrize("rows", [1, 4])
def test_a_round_of_drafts_promises_its_rows(rows):
    promise, module, kept = planned()
    wrapper = prefill_wrapper(module)
    promise.in_rounds(lambda *_: sglangs_plan(wrapper, rows), "updater", "ragged", wrapper, round_of_drafts())
    assert kept.args[-1] == rows
    assert wrapper._plan_info == ["a plan"]


def test_other_passes_promise_nothing():
    """A graph of prefills gets uneven requests, even if it was captured with equal ones."""
    promise, module, kept = planned()
    wrapper = prefill_wrapper(module)
    promise.in_rounds(lambda *_: sglangs_plan(wrapper, 4), "updater", "ragged", wrapper, None)
    assert kept.args[-1] == 0
    with pytest.raises(ZeroDivisionError):
        promise.in_rounds(lambda *_: 1 / 0, round_of_drafts())
    sglangs_plan(wrapper, 4)
    assert kept.args[-1] == 0


def test_without_a_graph_or_by_another_backend_nothing_changes():
    promise, module, kept = planned()
    promise.holds = True
    module.plan(*range(11), False, *range(12, 19), 0)
    assert kept.args[-1] == 0
    module.plan(*range(16))  # FA3's planner has no such argument
    assert kept.args == tuple(range(16))
    _, module, kept = planned("fa3")
    assert module.plan is kept


def test_hooks_are_there_where_flashinfer_is(monkeypatch):
    for name in flashinfer_plans.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flashinfer_plans, "locate", lambda name: None)
    assert list(flashinfer_plans.hooks()) == [] and not set(flashinfer_plans.SWITCHES) & set(os.environ)

    monkeypatch.setenv(flashinfer_plans.SWITCHES[0], "0")
    monkeypatch.setattr(flashinfer_plans, "locate", lambda name: name)
    assert [target for target, _, _ in flashinfer_plans.hooks()] == [flashinfer_plans.PLAN, flashinfer_plans.MODULE]
    assert [os.environ[name] for name in flashinfer_plans.SWITCHES] == ["0", "1"]
