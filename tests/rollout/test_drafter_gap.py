"""What is kept for the drafter while it is off, without an engine: which rows come back, in which order."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang.drafter_gap import DrafterGap


class Feeding(DrafterGap):
    """Notes what the drafter would be fed, `{request: [(token, hidden), ...]}`."""

    def _extend(self, batch, behind, counts, hidden, tokens):
        pairs = list(zip(tokens.tolist(), hidden[:, 0].tolist(), strict=True))
        self.fed, start = {}, 0
        for i, count in zip(behind, counts, strict=True):
            self.fed[batch.reqs[i].rid] = pairs[start : start + count]
            start += count


def running(*rids):
    return [SimpleNamespace(rid=rid) for rid in rids]


def batch(*rids):
    return SimpleNamespace(reqs=running(*rids), seq_lens=torch.zeros(len(rids)))


@pytest.mark.parametrize("every", [1, 3, 100])
def test_what_each_request_missed_comes_back_in_order(every):
    """Requests end, join and are prefilled anew between rounds; storing in between changes nothing."""
    gap, expected = Feeding(worker=None, every=every), {}
    for round_ in range(20):
        rids = [rid for rid in "abcd" if not (rid == "a" and round_ > 6) and not (rid == "d" and round_ < 9)]
        if round_ == 12:
            gap.forget(running("b"))
            expected["b"] = []
        tokens = torch.tensor([100 * round_ + ord(rid) for rid in rids])
        gap.record(running(*rids), tokens[:, None].float(), tokens)
        for rid, token in zip(rids, tokens.tolist(), strict=True):
            expected.setdefault(rid, []).append((token, float(token)))
    assert gap.rounds == 20
    gap.close(batch("d", "new", "b", "c"))
    assert gap.fed == {rid: expected[rid] for rid in "dbc"}
    assert gap.rounds == 0 and not gap.full


def test_memory_is_bounded_by_those_still_running():
    gap = Feeding(worker=None, every=4, most_tokens=50)
    for round_ in range(40):  # every request lives for one round
        gap.record(running(f"r{round_}"), torch.zeros(1, 2), torch.zeros(1))
        assert not gap.full
    for _ in range(50):
        gap.record(running("long"), torch.zeros(1, 2), torch.zeros(1))
    assert gap.full
    gap.close(batch("long"))
    assert len(gap.fed["long"]) == 50 and not gap.full
