"""When the lengths of a round are known on the host, with a map of SGLang's results that counts its reads."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.scheduler.known_lengths import KnownLengths


class Futures:
    """Reads lengths as `FutureMap` does: on the device, and from there to the host if attention needs it."""

    def __init__(self, needs_cpu_seq_lens=True):
        self.needs_cpu_seq_lens = needs_cpu_seq_lens
        self.lengths = {}  # by request, on the device
        self.reads = 0

    def resolve(self, batch):
        if batch.spec_info is None:
            return
        batch.seq_lens = torch.tensor([self.lengths[req] for req in batch.reqs])
        batch.seq_lens_cpu = batch.seq_lens_sum = None
        if self.needs_cpu_seq_lens:
            self.reads += 1
            batch.seq_lens_cpu = batch.seq_lens.clone()
            batch.seq_lens_sum = int(batch.seq_lens.sum())


class Rounds:
    def __init__(self, **options):
        self.known = KnownLengths()
        self.futures = Futures(**options)

    def run(self, reqs, accepted=None):
        """Run a round of requests, without drafts or with so many accepted; return whether it read the lengths."""
        reads = self.futures.reads
        batch = SimpleNamespace(reqs=list(reqs), spec_info="a draft", seq_lens_cpu=None)
        for req in reqs:
            self.futures.lengths.setdefault(req, 5)
        self.known.resolve(Futures.resolve, self.futures, batch)
        if self.futures.needs_cpu_seq_lens:
            assert batch.seq_lens_cpu.tolist() == batch.seq_lens.tolist()
            assert batch.seq_lens_sum == sum(batch.seq_lens.tolist())
        else:
            assert batch.seq_lens_cpu is None
        if accepted is None:
            self.known.after_off(batch)
        for req in reqs:
            self.futures.lengths[req] += 1 + (accepted or 0)
        return self.futures.reads > reads


def test_rounds_behind_one_without_drafts_read_nothing():
    rounds = Rounds()
    assert [rounds.run("ab") for _ in range(4)] == [True, False, False, False]
    assert [rounds.run("ab", accepted=2) for _ in range(3)] == [False, True, True]


def test_other_requests_are_read_and_so_are_the_same_ones_after_them():
    rounds = Rounds()
    rounds.run("ab")
    assert rounds.run("abc") and not rounds.run("abc")
    assert rounds.run("ab", accepted=1)
    rounds.run("a")
    rounds.futures.lengths["a"] = 70  # it came back after a prefill
    assert rounds.run("ab") and rounds.run("a") and rounds.run("ba") and rounds.run("ab")


def test_where_lengths_stay_on_the_device_they_do():
    rounds = Rounds(needs_cpu_seq_lens=False)
    assert [rounds.run("ab") for _ in range(3)] == [False] * 3


def test_a_failed_read_leaves_the_map_as_it_was():
    rounds = Rounds()
    rounds.run("ab")
    rounds.futures.lengths.clear()
    with pytest.raises(KeyError):
        rounds.known.resolve(Futures.resolve, rounds.futures, SimpleNamespace(reqs=["a", "b"], spec_info="a draft"))
    assert rounds.futures.needs_cpu_seq_lens


def test_a_prefill_keeps_the_lengths_that_it_brings():
    rounds = Rounds()
    rounds.run("ab")
    batch = SimpleNamespace(reqs=["a", "b"], spec_info=None, seq_lens_cpu="of the prompts")
    rounds.known.resolve(Futures.resolve, rounds.futures, batch)
    assert batch.seq_lens_cpu == "of the prompts"
