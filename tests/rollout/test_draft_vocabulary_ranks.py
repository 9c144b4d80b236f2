"""A draft vocabulary over tensor-parallel ranks, without an engine: two ranks over gloo hold what one rank holds."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from train_ranks import on_two

from megatron_rlspec.rollout.sglang.scheduler import draft_vocabulary

RANKS = 2
HEAD = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))  # of 11 tokens, padded by one
FIRST = [1, 2, 5, 6]
LATER = [7, 0, 9, 10]


def drafter_of(head: torch.Tensor, tokens: list[int]) -> SimpleNamespace:
    """What the hooks read of SGLang's draft worker."""
    embedding = torch.zeros(12, 4)
    lm_head = SimpleNamespace(weight=head)

    def set_embed_and_head(given: torch.Tensor, rows: torch.Tensor) -> None:
        assert given is embedding
        lm_head.weight = rows

    model = SimpleNamespace(lm_head=lm_head, set_embed_and_head=set_embed_and_head)
    return SimpleNamespace(
        hot_token_id=torch.tensor(tokens),
        speculative_algorithm=SimpleNamespace(is_eagle3=lambda: False),
        draft_runner=SimpleNamespace(model=model),
        target_worker=SimpleNamespace(model_config=SimpleNamespace(vocab_size=11)),
        _resolve_shared_embed_and_head=lambda: (embedding, head),
    )


def heads_of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The drafter's head on this rank at the start and after a new choice, and the tokens then."""

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=dist.group.WORLD)
        return x

    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank, all_reduce=all_reduce)
    drafter = drafter_of(HEAD.chunk(RANKS)[rank], FIRST)
    with mock.patch.object(draft_vocabulary, "parallel", lambda: SimpleNamespace(tp_group=group)):
        draft_vocabulary._init_head(None, drafter)
        first = drafter.draft_runner.model.lm_head.weight.clone()
        draft_vocabulary.renew(SimpleNamespace(draft_worker=drafter), LATER)
    return first, drafter.draft_runner.model.lm_head.weight, drafter.hot_token_id.tolist()


def test_two_ranks_draft_from_the_rows_of_one():
    """SGLang joins the ranks' logits, so their heads one above the other are the whole head's rows of the tokens."""
    firsts, laters, tokens = zip(*on_two(heads_of_rank), strict=True)
    assert torch.cat(firsts).equal(HEAD[FIRST])
    assert torch.cat(laters).equal(HEAD[sorted(LATER)]) and list(tokens) == RANKS * [sorted(LATER)]
    assert all(len(rows) == len(FIRST) // RANKS for rows in firsts)
