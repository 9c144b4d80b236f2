"""The names that `megatron_rlspec` gives, and the example of docs/api.md that trains a drafter."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import megatron_rlspec

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs/api.md").read_text(), re.DOTALL)


def test_every_public_name_can_be_imported():
    for name in megatron_rlspec.__all__:
        assert getattr(megatron_rlspec, name)


def test_a_drafter_learns_in_any_trainer():
    """The example's loss is the mean forward KL from the policy at the next position, where both are trained."""
    names = {}
    exec(EXAMPLES[1], names)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = torch.randint(32, (12,), generator=generator)
    mask = torch.tensor([0.0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1])
    hidden, embedding, head = random(12, 8), random(32, 8), random(32, 8)
    mix = random(16, 8).requires_grad_()

    def drafter(embedded, read):
        return torch.cat([embedded, read], 1) @ mix

    loss, sums = names["drafter_loss"](drafter, tokens, mask, torch.tensor([0, 5, 12]), hidden, embedding, head)
    loss.backward()
    rows = torch.tensor([1, 2, 6, 7, 8, 9])
    read = torch.cat([embedding[tokens[rows + 1]], hidden[rows]], 1)
    draft = (read @ mix @ head.T).log_softmax(1)
    policy = (hidden[rows + 1] @ head.T).log_softmax(1)
    expected = torch.nn.functional.kl_div(draft, policy, log_target=True, reduction="batchmean")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mix.grad, torch.autograd.grad(expected, mix)[0])
    assert sums["tokens"] == len(rows)
