"""Rounds without drafts: the tokens that are stored for the drafter."""

from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.scheduler.drafter_gap import DrafterGap


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
        for i, start, size, after in zip(read.behind, read.starts, read.sizes, read.next_tokens.tolist(), strict=True):
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
            self.gap.mark_read(self.reqs(rids))

    def reqs(self, rids=None):
        return [SimpleNamespace(rid=rid) for rid in (self.length if rids is None else rids)]

    def tokens(self, rid, start, count):
        return [1000 * ord(rid) + start + i for i in range(count)]

    def round(self, accepted=None):
        """Run one round: off, or with accepted[request] of 3 tokens."""
        width = 1 if accepted is None else 3
        rows = [t for rid in self.length for t in self.tokens(rid, self.length[rid], width)]
        tokens = torch.tensor(rows)
        counts = None if accepted is None else torch.tensor([accepted[rid] for rid in self.length])
        self.gap.record(self.reqs(), tokens[:, None] / 2, tokens, counts, [])
        for i, rid in enumerate(self.length):
            self.length[rid] += 1 if counts is None else int(counts[i])

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
