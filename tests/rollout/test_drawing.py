"""When the batch of a partial rollout is full, what it keeps, and what goes on."""

from __future__ import annotations

import numpy as np

from megatron_rlspec.rollout.partial import Drawing, mask_continued
from megatron_rlspec.types import Group, OpenGroup, Partial, Prompt, Request, Sample
from megatron_rlspec.wire import decode, encode


def group(number: int, samples: int = 2, begun: int | None = None) -> OpenGroup:
    """Return a group; `begun` is the version under which its first sample has drawn two tokens."""
    prompt = Prompt(number, np.array([1, 2]))
    requests = [Request(f"g{number}-n{i}.", prompt, seed=10 * number + i) for i in range(samples)]
    if begun is not None:
        partial = Partial(np.array([7, 8]), np.array([-1.0, -2.0], np.float32), ((begun, 0, 2),))
        requests[0] = Request(requests[0].id, prompt, requests[0].seed, partial)
    return OpenGroup(requests)


def sample(request: Request, version: int = 5, length: int = 3, reward: float = 0.0, status="finished") -> Sample:
    begun = () if request.partial is None else request.partial.policy_versions
    first = 0 if request.partial is None else 2
    tokens = np.arange(2 + first + length)
    mask = np.concatenate([np.zeros(2, np.float32), np.ones(first + length, np.float32)])
    spans = (*begun, (version, first, first + length)) if length else begun
    return Sample(request.id, request.prompt, tokens, mask, -mask, status, spans, reward=reward)


def test_a_batch_is_full_when_enough_groups_are_complete_and_none_is_due() -> None:
    """The first group's tokens are of version 3. The next step trains on 4 and later, so this step waits for it."""
    groups = [group(0, begun=3), group(1, begun=4), group(2), group(3)]
    drawing = Drawing(groups, wanted=2, oldest=4)
    order = [*groups[3].requests, *groups[2].requests, groups[1].requests[0], *groups[0].requests]
    told = [drawing.add(sample(request)) for request in order]
    assert told == [False] * 6 + [True]
    assert not drawing.add(sample(groups[1].requests[1])) and drawing.full
    chosen, left = drawing.batch()
    assert [g.prompt.id for g in chosen] == [0, 1] and [g.complete for g in left] == [True, True]
    assert [s.request_id for s in chosen[0].samples] == ["g0-n0.", "g0-n1."]
    assert not groups[2].samples, "the given groups stay as they were"


def test_what_goes_on_keeps_its_tokens_unless_they_are_too_old() -> None:
    groups = [group(0), group(1), group(2, begun=3)]
    drawing = Drawing(groups, wanted=1, oldest=4)
    for request in groups[0].requests:
        drawing.add(sample(request))
    drawing.add(sample(groups[1].requests[0], reward=2.0))
    drawing.store_partials(
        [sample(groups[1].requests[1], length=4, status="aborted"), sample(groups[2].requests[1], length=0)]
    )
    assert [r.id for r in drawing.requests()] == ["g1-n1.", "g2-n0.", "g2-n1."]
    _, left = drawing.batch()
    one, two = decode(encode(left), list[OpenGroup])
    assert one.samples[0].reward == 2.0 and one.requests[1].partial.response.tolist() == [2, 3, 4, 5]
    assert one.requests[1].partial.policy_versions == ((5, 0, 4),) and one.requests[1].seed == 11
    assert [r.partial for r in two.requests] == [None, None] and not two.samples


def test_groups_that_may_not_be_trained_on_count_for_nothing() -> None:
    def differ(found: Group) -> bool:
        return len({s.reward for s in found.samples}) > 1

    groups = [group(0), group(1)]
    drawing = Drawing(groups, wanted=1, oldest=0, usable=differ)
    assert not any(drawing.add(sample(request)) for request in groups[0].requests)
    drawing.drop_unusable()
    assert len(drawing.groups) == 1 and not drawing.full
    assert [drawing.add(sample(r, reward=i)) for i, r in enumerate(groups[1].requests)] == [False, True]
    assert [g.prompt.id for g in drawing.batch()[0]] == [1]


def test_tokens_from_before_the_continuation_can_be_left_out_of_the_loss() -> None:
    continued, whole = sample(group(0, begun=3).requests[0]), sample(group(1).requests[0], version=3)
    mask_continued([continued, whole])
    assert continued.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 1] and whole.loss_mask.tolist() == [0, 0, 1, 1, 1]
