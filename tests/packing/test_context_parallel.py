import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlspec.packing.context_parallel import cp_index, join_from_cp, slice_for_cp


def brute_zigzag(lengths, rank, size):
    """Chunk lists, sequence by sequence."""
    held, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        chunks = [list(range(start + i * chunk, start + (i + 1) * chunk)) for i in range(2 * size)]
        held += chunks[rank] + chunks[2 * size - 1 - rank]
        start += length
    return held


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@given(chunks=st.lists(st.integers(0, 5), max_size=6), size=st.integers(2, 5))
@settings(max_examples=100)
def test_zigzag_is_the_brute_force_one(chunks, size):
    lengths = [2 * size * n for n in chunks]
    for rank in range(size):
        assert cp_index(boundaries(lengths), rank, size).tolist() == brute_zigzag(lengths, rank, size)


def test_one_worked_example():
    cu = boundaries([8, 4])
    assert cp_index(cu, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert cp_index(cu, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@given(
    chunks=st.lists(st.integers(0, 5), max_size=6),
    size=st.integers(1, 5),
    columns=st.sampled_from([(), (3,)]),
)
@settings(max_examples=100)
def test_joining_the_shares_gives_the_whole(chunks, size, columns):
    cu = boundaries([2 * size * n for n in chunks])
    x = torch.randn(int(cu[-1]), *columns)
    shares = [slice_for_cp(x, cu, rank, size) for rank in range(size)]
    assert all(len(share) == int(cu[-1]) // size for share in shares)
    assert torch.equal(join_from_cp(shares, cu), x)


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="padded length 6 is not a multiple of 4"):
        cp_index(boundaries([4, 6]), 0, 2)
