"""Rounds without drafts: the tokens that are stored for the drafter, and lengths that the host knows."""

from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.scheduler.drafter_gap import DrafterGap
from megatron_rlspec.rollout.sglang.scheduler.known_lengths import KnownLengths


class Feeding(DrafterGap):
    """Records what the drafter is fed, `{request: [(position, token, hidden, next token)]}`; refuses gaps."""

    def __init__(self, **options):
        super().__init__(worker=None, **options)
        self.fed = {}
        self.passes = []

    def _extend(self, batch, read):
        self.passes.append(len(read.tokens))
        assert len(set(read.behind)) == len(read.behind) and sum(read.sizes) == len(read.tokens) == len(read.hidden)
        at = 0
        for i, start, size, after in zip(read.behind, read.starts, read.sizes, read.following.tolist(), strict=True):
            tokens, hidden = read.tokens[at : at + size].tolist(), read.hidden[at : at + size, 0].tolist()
            rows = zip(range(start, start + size), tokens, hidden, [*tokens[1:], after], strict=True)
            self.fed.setdefault(batch.reqs[i].rid, []).extend(rows)
            at += size

    def take(self):
        fed, self.fed = self.fed, {}
        return fed


class Requests:
    """Running requests whose token at position p is 1000 * request + p; a hidden state is half its token."""

    def __init__(self, gap, *rids):
        self.gap = gap
        self.length = {}
        self.seen = {}
        self.prefill(*rids)

    def prefill(self, *rids, length=5):
        for rid in rids:
            self.length[rid] = self.seen[rid] = length
        if self.gap.open:
            self.gap.forget(self.reqs(rids))

    def reqs(self, rids=None):
        return [SimpleNamespace(rid=rid) for rid in (self.length if rids is None else rids)]

    def tokens(self, rid, start, count):
        return [1000 * ord(rid) + start + i for i in range(count)]

    def round(self, accepted=None, current=()):
        """Run one round: off, or with accepted[request] of 3 tokens, read by the drafters of the `current` requests."""
        width = 1 if accepted is None else 3
        rows = [t for rid in self.length for t in self.tokens(rid, self.length[rid], width)]
        tokens = torch.tensor(rows)
        counts = None if accepted is None else torch.tensor([accepted[rid] for rid in self.length])
        self.gap.record(self.reqs(), tokens[:, None] / 2, tokens, counts, [list(self.length).index(r) for r in current])
        for i, rid in enumerate(self.length):
            self.length[rid] += 1 if counts is None else int(counts[i])
            if rid in current:
                self.seen[rid] = self.length[rid]

    def batch(self):
        ends = torch.tensor(list(self.length.values()))
        bonus = torch.tensor([t for rid, n in self.length.items() for t in self.tokens(rid, n, 1)], dtype=torch.int32)
        spec = SimpleNamespace(bonus_tokens=bonus)
        return SimpleNamespace(reqs=self.reqs(), seq_lens=ends, seq_lens_cpu=ends, spec_info=spec)

    def missed(self, *rids):
        """Return what the drafters of these requests must be fed: every missed position exactly once."""
        expected = {}
        for rid in rids:
            span = range(self.seen[rid], self.length[rid])
            if span:
                tokens = self.tokens(rid, span.start, len(span) + 1)
                expected[rid] = [(p, t, t / 2, after) for p, t, after in zip(span, tokens, tokens[1:], strict=False)]
            self.seen[rid] = self.length[rid]
        return expected


@pytest.mark.parametrize("most", [7, 8192])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_missed_tokens_of_each_request_are_read_in_order(every, most):
    """Requests end, join and are prefilled anew between rounds; storing and splitting in between changes nothing."""
    gap = Feeding(every=every, most=most)
    requests = Requests(gap, *"abc")
    for number in range(20):
        if number == 7:
            del requests.length["a"]
        if number == 9:
            requests.prefill("d")
        if number == 12:
            requests.prefill("b", length=9)
        requests.round()
    requests.prefill("e")
    gap.close(requests.batch(), 4)
    assert gap.take() == requests.missed(*"bcde") and max(gap.passes) <= most
    assert not gap.open


def stored(gap):
    """Return (request, rows) of what host memory holds once all copies have ended."""
    wait(gap._stash._chunks)
    gap._stash.keep(set(gap._number.values()))
    return [item for chunk in gap._stash._chunks for item in chunk.result().items()]


@pytest.mark.parametrize("every", [1, 3])
def test_rows_of_ended_requests_leave_host_memory_and_the_others_stay_whole(every):
    gap = Feeding(every=every)
    requests = Requests(gap, *"abcd")
    for accepted in ({"a": 1, "b": 2, "c": 1, "d": 3}, None, None, {"a": 2, "b": 1, "c": 3, "d": 1}, None, None):
        requests.round(accepted)
    for ended in "abc":
        del requests.length[ended]
    for _ in range(3):
        requests.round()
    rows = stored(gap)
    assert {number for number, _ in rows} == {gap._number["d"]}
    assert sum(len(own.hidden) for _, own in rows) == 3 + 1 + 1 + 1 + 1 + 1 + 3
    gap.close(requests.batch(), 1)
    assert gap.take() == requests.missed("d")


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
