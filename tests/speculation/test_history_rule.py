"""Old answers as drafts: what is kept, what follows a text, and when that replaces the drafter's drafts."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlspec.speculation.history import LONGEST, START, TRIES, Answers, Sources, Texts, agreed


def test_the_last_steps_answers_are_kept_within_a_number_of_tokens():
    kept = Answers(most=10)
    kept.keep(7, 0, {1: np.arange(4)})
    kept.keep(7, 0, {2: np.arange(3)})  # the prompt came twice in this step
    kept.keep(8, 0, {5: np.arange(2)})
    assert {seed: len(tokens) for seed, tokens in kept.of(7).items()} == {1: 4, 2: 3}
    kept.keep(7, 1, {3: np.arange(5)})
    assert list(kept.of(7)) == [3] and kept.tokens == 7
    again = Answers(most=10)
    again.restore(kept.state())
    for one in (kept, again):
        one.keep(9, 1, {4: np.arange(4)})  # 8 is the oldest, though its id is not the lowest
        assert not one.of(8) and one.of(7) and one.tokens == 9
    assert [(prompt, step) for prompt, step, _ in again.state()] == [(7, 1), (9, 1)]
    kept.clear()
    assert not kept.of(7) and kept.tokens == 0


@pytest.mark.parametrize(
    ("answers", "shared"),
    [
        ([], []),
        ([[1, 2, 3]], []),
        ([[1, 2, 3], [1, 2, 4]], [1, 2]),
        ([[5, 1], [5, 2, 7, 9], [5, 2, 7, 8], [6, 2]], [5, 2, 7]),
        ([[5, 2], [5, 2], []], [5, 2]),
    ],
)
def test_the_beginning_that_answers_share_is_what_two_of_them_say(answers, shared):
    assert agreed([np.array(answer, np.int64) for answer in answers]).tolist() == shared


def longest_match(answers: list[list[int]], text: list[int]) -> tuple[int, set[tuple[int, ...]]]:
    """Return the longest match of the end of a text, and all that followed at it."""
    whole = [START, *text]
    found: dict[int, set[tuple[int, ...]]] = {}
    for answer in answers:
        marked = [START, *answer]
        for at in range(1, len(marked)):
            match = 0
            while match < min(at, len(whole), LONGEST) and marked[at - 1 - match] == whole[-1 - match]:
                match += 1
            found.setdefault(match, set()).add(tuple(marked[at:]))
    best = max(found, default=0)
    return best, found.get(best, set()) if best else set()


def test_what_followed_the_longest_match_is_offered():
    draw = np.random.default_rng(0)
    for _ in range(200):
        answers = [draw.integers(0, 3, draw.integers(0, 12)).tolist() for _ in range(3)]
        text = draw.integers(0, 3, draw.integers(0, 12)).tolist()
        texts = Texts(map(np.array, answers[:2]))
        texts.add(answers[2])
        end = np.array([START, *text] if len(text) < LONGEST else text[-LONGEST:])
        match, drafts = texts.follow(end, 4)
        expected, followed = longest_match(answers, text)
        assert match == expected
        assert not match or tuple(drafts) in {each[:4] for each in followed}


def test_what_followed_most_often_and_last_counts():
    texts = Texts(map(np.array, ([5, 1, 9], [5, 2, 3], [5, 2, 4])))
    assert texts.follow(np.array([START, 5]), 8) == (2, pytest.approx([2, 4]))


def test_each_source_is_tried_and_then_the_better_one_is_taken_at_each_match():
    sources = Sources()
    accepts = {1: (3, 1), 2: (1, 3)}  # match -> drafts of (drafter, history)
    chosen: dict[int, list[bool]] = {1: [], 2: []}
    for _ in range(3 * TRIES):
        for match, pair in accepts.items():
            chosen[match].append(sources.history(match))
            sources.observe(match, chosen[match][-1], pair[chosen[match][-1]])
    for match in accepts:
        assert sum(chosen[match][: 2 * TRIES]) == TRIES
        assert set(chosen[match][2 * TRIES :]) == {match == 2}
