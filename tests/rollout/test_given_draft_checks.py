"""What an engine takes over of a draft: the tokens that its own logits draw, up to where they differ or end."""

import numpy as np
import pytest
import torch

from megatron_rlspec.noise import draw
from megatron_rlspec.rollout.sglang.http import given_draft
from megatron_rlspec.texts import StopStrings

GO_ON = given_draft.Ends(stops=set(), strings=None, limit=100)
WEIGHTS = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))  # log-probs of a token after the one before


def keyed(token: int, position: int, seed: int) -> tuple[int, float]:
    """Draw the token after `token` at `position`, and return it with its log-prob."""
    logp = torch.log_softmax(WEIGHTS[token][None], -1)
    found = int(draw(logp, torch.tensor([seed]), torch.tensor([position]))[0])
    return found, float(logp[0, found])


def said(prompt: list[int], seed: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(keyed(tokens[-1], len(tokens) - 1, seed)[0])
    return tokens[len(prompt) :]


def taken(draft, begun=(), ends=GO_ON, seed=5) -> given_draft.Checked:
    """Return what holds of a draft by a model of one table, whose logits at every position draw a token."""
    text = [3, 4, *begun, *draft]
    first = len(text) - len(draft)
    drawn = [keyed(text[place - 1], place - 1, seed)[::-1] for place in range(first, len(text))]
    return given_draft.taken(list(begun), draft, drawn, ends, "1")


def test_a_draft_holds_up_to_the_first_token_that_the_weights_would_not_draw():
    own = said([3, 4], 5, 20)
    for place in range(20):
        for wrong in {0, 7} - {own[place]}:
            found = taken([*own[:place], wrong, *own[place + 1 :]])
            assert found.tokens == own[: place + 1], "the weights' own token stands in the wrong one's place"
            assert len(found.logprobs) == place + 1 and found.finish is None and found.version == "1"
    whole = taken(own)
    assert whole.tokens == own
    other = taken(own, seed=6)
    assert other.tokens == said([3, 4], 6, len(other.tokens)) and len(other.tokens) < 20
    later = taken(own[4:], begun=own[:4])
    assert later.tokens == own[4:] and later.logprobs == whole.logprobs[4:]


@pytest.mark.parametrize(
    ("ends", "count", "reason"),
    [
        (given_draft.Ends(set(), None, 100), 8, None),
        (given_draft.Ends(set(), None, 8), 8, "length"),
        (given_draft.Ends(set(), None, 5), 5, "length"),
        (given_draft.Ends({13}, None, 100), 4, "stop"),
        (given_draft.Ends({13}, None, 4), 4, "stop"),
        (given_draft.Ends({13}, None, 3), 3, "length"),
        (given_draft.Ends(set(), StopStrings(["lm"], lambda ids: "".join(chr(97 + i) for i in ids)), 100), 3, "stop"),
        (given_draft.Ends({10}, StopStrings(["lm"], lambda ids: "".join(chr(97 + i) for i in ids)), 100), 1, "stop"),
    ],
)
def test_a_response_ends_where_plain_decoding_ends_it(ends, count, reason):
    found, finish = ends.of([10, 11, 12, 13, 14, 15, 16, 17], 0)
    assert (found, finish and finish["type"]) == (count, reason)


def test_a_sample_names_the_weights_of_each_part():
    line = {"output_ids": [8, 9], "logprobs": [-1.0, -2.0], "drafted": [0, 1]}
    for version, spans in (("1", [("1", 0, 5)]), ("2", [("1", 0, 3), ("2", 3, 5)])):
        last = line | {"weight_versions": [{"version": version, "start": 0, "end": 2}]}
        found = given_draft.Checked([5, 6, 7], [-0.1, -0.2, -0.3], "1").before(last)
        assert [tuple(span.values()) for span in found["weight_versions"]] == spans
        assert found["output_ids"] == [5, 6, 7, 8, 9] and found["drafted"] == [0, 0, 0, 0, 1]
        np.testing.assert_array_equal(found["logprobs"], [-0.1, -0.2, -0.3, -1.0, -2.0])
    assert given_draft.Checked().before(line) is line
