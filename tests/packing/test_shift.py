import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlspec.packing.shift import drafter_targets, shift_packed

DTYPES = [torch.int64, torch.int32, torch.bool, torch.uint8, torch.float32, torch.float64, torch.bfloat16]


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def brute_shift(x, lengths, steps):
    """One position at a time, sequence by sequence."""
    source, out, start = x.movedim(-1, 0), torch.zeros_like(x.movedim(-1, 0)), 0
    for length in lengths:
        for i in range(length):
            if i + steps < length:
                out[start + i] = source[start + i + steps]
        start += length
    return out.movedim(0, -1)


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


# --- whole batches -------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    outside=st.integers(0, 3),
    steps=st.integers(0, 11),
    dtype=st.sampled_from(DTYPES),
    leading=st.sampled_from([(), (1,), (2, 3)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300)
def test_shift_is_the_brute_force_one(lengths, outside, steps, dtype, leading, seed):
    x = random_tensor((*leading, sum(lengths) + outside), dtype, seed)
    assert torch.equal(shift_packed(x, boundaries(lengths), steps), brute_shift(x, lengths, steps))


def test_shift_differentiates():
    lengths, x = [3, 0, 1, 4], torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    out = shift_packed(x, boundaries(lengths), 2)
    assert torch.equal(out, brute_shift(x.detach(), lengths, 2))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected = torch.zeros_like(x)
    expected[:, 2], expected[:, 6:8] = upstream[:, 0], upstream[:, 4:6]
    assert torch.equal(x.grad, expected)


# --- masks ---------------------------------------------------------------------------------------------------------


def brute_targets(tokens, mask, lengths, depth):
    """The definition, spelled out: position t trains depth d iff m is 1 on t + 1 .. t + 1 + d, all in its sequence."""
    total, tokens, mask = len(tokens), tokens.tolist(), mask.tolist()
    sequence = [i for i, length in enumerate(lengths) for _ in range(length)]

    def same(t, u):
        return u < total and sequence[u] == sequence[t]

    reads = [[tokens[t + d] if same(t, t + d) else 0 for t in range(total)] for d in range(1, depth + 1)]
    labels = [[tokens[t + 1 + d] if same(t, t + 1 + d) else 0 for t in range(total)] for d in range(1, depth + 1)]
    trained = [
        [float(all(same(t, u) and mask[u] == 1 for u in range(t + 1, t + 2 + d))) for t in range(total)]
        for d in range(1, depth + 1)
    ]
    return reads, labels, trained


@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    depth=st.integers(1, 5),
    holes=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300)
def test_targets_are_the_definition(lengths, depth, holes, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 100, (sum(lengths),), generator=generator)
    mask = (torch.rand(sum(lengths), generator=generator) >= holes).float()
    got = drafter_targets(tokens, mask, boundaries(lengths), depth)
    assert tuple([x.tolist() for x in part] for part in got) == brute_targets(tokens, mask, lengths, depth)


def test_the_token_between_must_be_trained_too():
    # Tokens a b c d e with mask 1 0 1 1 0. Shifted twice the mask is 1 1 0 - -, but c was not drafted from a: b is not
    # the policy's. Only d from b, with c between, remains.
    _, labels, mask = drafter_targets(
        torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1.0, 0, 1, 1, 0]), boundaries([5]), 1
    )
    assert mask[0].tolist() == [0, 1, 0, 0, 0]
    assert labels[0].tolist() == [3, 4, 5, 0, 0]


def test_first_response_token_is_read_but_never_predicted():
    # Prompt 100..102, response 103..107: depth 1 is trained on 104..107, the last token included.
    tokens, mask = torch.arange(100, 108), torch.tensor([0.0] * 3 + [1.0] * 5)
    reads, labels, trained = drafter_targets(tokens, mask, boundaries([8]), 2)
    assert labels[0][trained[0] == 1].tolist() == [104, 105, 106, 107]
    assert reads[0][trained[0] == 1].tolist() == [103, 104, 105, 106]
    assert labels[1][trained[1] == 1].tolist() == [105, 106, 107]
