import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_ranks import Ranks, group_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rlspec.packing.context_parallel import join_from_cp, slice_for_cp
from megatron_rlspec.packing.shift import RollPlan, drafter_targets, shift_packed

RANKS = 4
DTYPES = [torch.int64, torch.int32, torch.bool, torch.uint8, torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(scope="module")
def ranks():
    workers = Ranks(RANKS)
    yield workers
    workers.close()


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def brute_shift(x, lengths, steps, dim=-1, fill=0):
    """One position at a time, sequence by sequence."""
    source, out, start = x.movedim(dim, 0), torch.full_like(x.movedim(dim, 0), fill), 0
    for length in lengths:
        for i in range(length):
            if i + steps < length:
                out[start + i] = source[start + i + steps]
        start += length
    return out.movedim(0, dim)


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


# --- whole batches -------------------------------------------------------------------------------------------------


def check_shift(lengths, outside, steps, dtype, leading, seed):
    x = random_tensor((*leading, sum(lengths) + outside), dtype, seed)
    assert torch.equal(shift_packed(x, boundaries(lengths), steps), brute_shift(x, lengths, steps))


shifts = given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    outside=st.integers(0, 3),
    steps=st.integers(0, 11),
    dtype=st.sampled_from(DTYPES),
    leading=st.sampled_from([(), (1,), (2, 3)]),
    seed=st.integers(0, 1000),
)
test_shift_is_the_brute_force_one = settings(max_examples=300, deadline=None)(shifts(check_shift))
test_shift_is_the_brute_force_one_10000 = pytest.mark.slow(
    settings(max_examples=10_000, deadline=None)(shifts(check_shift))
)


def test_shift_fills_and_differentiates():
    lengths, x = [3, 0, 1, 4], torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    out = shift_packed(x, boundaries(lengths), 2, fill=-7)
    assert torch.equal(out, brute_shift(x.detach(), lengths, 2, fill=-7))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected = torch.zeros_like(x)
    expected[:, 2], expected[:, 6:8] = upstream[:, 0], upstream[:, 4:6]
    assert torch.equal(x.grad, expected)


def test_megatrons_own_packed_roll_is_wrong_where_sequences_are_padded():
    """The control, and the reason why this package rolls by itself: it cuts at the boundaries without padding."""
    packed_seq_params = pytest.importorskip("megatron.core.packed_seq_params").PackedSeqParams
    roll = pytest.importorskip("megatron.core.transformer.multi_token_prediction").roll_tensor
    real = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    padded = torch.tensor([0, 4, 12, 14], dtype=torch.int32)
    packed = packed_seq_params(
        qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded
    )
    tokens = torch.arange(1, 15)[None]
    rolled = roll(tokens, shifts=-1, dims=-1, packed_seq_params=packed)[0]
    successors = [0, 1, 4, 5, 6, 7]  # positions whose next token is in the same sequence
    wrong = [t for t in successors if rolled[0, t] != tokens[0, t + 1]]
    assert wrong
    assert torch.equal(shift_packed(tokens, padded)[0, successors], tokens[0, [t + 1 for t in successors]])


def test_shift_to_the_right_is_refused():
    with pytest.raises(ValueError, match="steps >= 0"):
        shift_packed(torch.arange(4), boundaries([4]), -1)


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


def check_targets(lengths, depth, holes, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 100, (sum(lengths),), generator=generator)
    mask = (torch.rand(sum(lengths), generator=generator) >= holes).float()
    got = drafter_targets(tokens, mask, boundaries(lengths), depth)
    assert tuple([x.tolist() for x in part] for part in got) == brute_targets(tokens, mask, lengths, depth)


targets = given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    depth=st.integers(1, 5),
    holes=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
test_targets_are_the_definition = settings(max_examples=300, deadline=None)(targets(check_targets))
test_targets_are_the_definition_10000 = pytest.mark.slow(
    settings(max_examples=10_000, deadline=None)(targets(check_targets))
)


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


# --- batches that arrive cut ---------------------------------------------------------------------------------------


def roll_in_worker(rank, lengths, size, layout, steps, dim, shards):
    if rank >= size:
        return None
    plan = RollPlan(boundaries(lengths), rank, size, layout, steps=steps, group=group_of(size))
    each = plan.roll_each(shards[rank], steps, dim)
    last = plan.roll(shards[rank], steps, dim)
    assert all(torch.equal(a, b) for a, b in zip(last, each[-1], strict=True))
    tokens, mask = torch.arange(1, sum(lengths) + 1), (torch.arange(sum(lengths)) % 7 != 3).float()
    cut = [slice_for_cp(x, boundaries(lengths), rank, size, layout) for x in (tokens, mask)]
    return each, drafter_targets(*cut, plan, steps - 1) if steps > 1 else None


def check_roll(ranks, lengths, size, layout, steps, columns, seed):
    lengths = [length * 2 * size for length in lengths]
    cu, total = boundaries(lengths), sum(lengths)
    whole, dims = [], []
    for i, (dtype, shape, dim) in enumerate(columns):
        shape = list(shape)
        shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, total)
        whole.append(random_tensor(shape, dtype, seed + i))
        dims.append(dim)
    shards = [[slice_for_cp(x, cu, r, size, layout, d) for x, d in zip(whole, dims, strict=True)] for r in range(size)]
    results = ranks.run(roll_in_worker, lengths, size, layout, steps, dims, shards)[:size]
    for step in range(1, steps + 1):
        for i, (x, dim) in enumerate(zip(whole, dims, strict=True)):
            got = join_from_cp([each[step - 1][i] for each, _ in results], cu, layout, dim)
            assert torch.equal(got, brute_shift(x, lengths, step, dim)), (step, i)
    if steps > 1:
        tokens, mask = torch.arange(1, total + 1), (torch.arange(total) % 7 != 3).float()
        expected = drafter_targets(tokens, mask, cu, steps - 1)
        for part in range(3):
            for depth in range(steps - 1):
                got = join_from_cp([targets[part][depth] for _, targets in results], cu, layout)
                assert torch.equal(got, expected[part][depth])


column = st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (3,)]), st.just(-1)) | st.tuples(
    st.sampled_from(DTYPES), st.sampled_from([(), (1, 4), (5,)]), st.just(0)
)
rolls = given(
    lengths=st.lists(st.integers(0, 4), max_size=6),
    size=st.integers(1, RANKS),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    steps=st.integers(1, 5),
    columns=st.lists(column, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)


def test_roll_of_a_cut_batch_is_the_brute_force_one(ranks):
    settings(max_examples=60, deadline=None)(rolls(lambda **case: check_roll(ranks, **case)))()


@pytest.mark.slow
def test_roll_of_a_cut_batch_is_the_brute_force_one_10000(ranks):
    settings(max_examples=10_000, deadline=None)(rolls(lambda **case: check_roll(ranks, **case)))()


def gradient_in_worker(rank, lengths, size, layout, steps, shards, upstream):
    if rank >= size:
        return None
    plan = RollPlan(boundaries(lengths), rank, size, layout, steps=steps, group=group_of(size))
    x = shards[rank].requires_grad_()
    for s, ((out, tokens), seed) in enumerate(
        zip(plan.roll_each([x, torch.arange(len(x))], steps, 0), upstream, strict=True)
    ):
        assert tokens.dtype == torch.int64 and not tokens.requires_grad
        (out * seed[rank]).sum().backward(retain_graph=s + 1 < steps)
    return x.grad


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_roll_sends_gradients_back(ranks, size, layout):
    lengths, steps = [2 * size, 0, 6 * size, 2 * size], 3
    cu, total = boundaries(lengths), sum(lengths)
    x = torch.randn(total, 3, dtype=torch.float64, requires_grad=True)
    upstream = [torch.randn_like(x) for _ in range(steps)]
    for s in range(steps):
        (shift_packed(x.t(), cu, s + 1).t() * upstream[s]).sum().backward()

    def cut(y):
        return [slice_for_cp(y, cu, rank, size, layout, 0) for rank in range(size)]

    got = ranks.run(gradient_in_worker, lengths, size, layout, steps, cut(x.detach()), [cut(u) for u in upstream])
    assert torch.allclose(join_from_cp(got[:size], cu, layout, 0), x.grad, rtol=0, atol=1e-12)


def messages_in_worker(rank, lengths, size, layout, steps, count):
    plan = RollPlan(boundaries(lengths), rank, size, layout, steps=steps, group=group_of(size))
    sent, original = [], dist.batch_isend_irecv

    def counting(operations):
        sent.extend(operation.peer for operation in operations if operation.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counting
    try:
        plan.roll_each([torch.zeros(sum(lengths) // size, dtype=DTYPES[i]) for i in range(count)], steps)
    finally:
        dist.batch_isend_irecv = original
    return sent


@pytest.mark.parametrize(("sequences", "count", "steps"), [(1, 1, 1), (1, 4, 1), (64, 4, 1), (64, 4, 3)])
def test_messages_do_not_grow_with_sequences_tensors_or_steps(ranks, sequences, count, steps):
    lengths = [6 * RANKS] * sequences  # chunks of three tokens: as long as the farthest step
    zigzag = ranks.run(messages_in_worker, lengths, RANKS, "zigzag", steps, count)
    assert [sorted(peers) for peers in zigzag] == [[1], [0, 2], [1, 3], [2]]
    contiguous = ranks.run(messages_in_worker, [6 * RANKS * sequences], RANKS, "contiguous", steps, count)
    assert contiguous == [[], [0], [1], [2]]


def teacher_in_worker(rank, lengths, size, layout, steps, shards):
    plan = RollPlan(boundaries(lengths), rank, size, layout, steps=steps, group=group_of(size))
    x = shards[rank]
    rows = torch.cat([x, *plan.halo([x], 0)])
    return [rows[plan.index(step)] for step in range(1, steps + 1)]


def test_index_finds_every_row_in_local_and_halo(ranks):
    lengths, steps = [8, 8, 40, 0], 3
    cu, x = boundaries(lengths), torch.arange(1, sum(lengths) + 1)
    shards = [slice_for_cp(x, cu, rank, RANKS) for rank in range(RANKS)]
    got = ranks.run(teacher_in_worker, lengths, RANKS, "zigzag", steps, shards)
    for step in range(1, steps + 1):
        expected = shift_packed(x, cu, step)
        expected = torch.where(expected == 0, x, expected)  # beyond the end: the position itself
        assert torch.equal(join_from_cp([part[step - 1] for part in got], cu), expected)


class NoHostRead(TorchDispatchMode):
    """Raises on operators whose result the host must wait for on a GPU."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"):
            raise AssertionError(f"{operator} reads from the device")
        return operator(*args, **(kwargs or {}))


def uses_in_worker(rank, lengths, size):
    cu = boundaries(lengths)
    plan = RollPlan(cu, rank, size, steps=3, group=group_of(size))
    x = torch.ones(2, plan.length, requires_grad=True)
    with NoHostRead():
        plan.roll([x, torch.arange(plan.length)], 2)[0].sum().backward()
        drafter_targets(torch.arange(plan.length), torch.ones(plan.length), plan, 2)
        plan.index(3)
        drafter_targets(torch.arange(sum(lengths)), torch.ones(sum(lengths)), cu, 2)


def test_nothing_is_read_back_to_the_host_once_a_plan_is_made(ranks):
    ranks.run(uses_in_worker, [8, 0, 48], RANKS)


def test_plan_refuses_what_it_was_not_built_for():
    plan = RollPlan(boundaries([4, 4]), steps=2)
    with pytest.raises(ValueError, match="shift by 3, but this plan shifts by 1 to 2"):
        plan.roll([torch.arange(8)], 3)
    with pytest.raises(ValueError, match="should be 8"):
        plan.roll([torch.arange(9)])
    with pytest.raises(ValueError, match="not a multiple of 4"):
        RollPlan(boundaries([4, 6]), 0, 2)
    with pytest.raises(ValueError, match="at least 1"):
        RollPlan(boundaries([4]), steps=0)
