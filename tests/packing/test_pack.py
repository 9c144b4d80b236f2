"""Packed batches against loops over samples: for every (DP, CP, budget) the sums are those of the step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.losses.logprobs import policy_logprobs
from megatron_rlspec.packing.pack import pack, partition
from megatron_rlspec.types import Prompt, Sample

VOCABULARY, HIDDEN, DEPTH = 13, 5, 3
FIELDS = (
    "tokens labels loss_mask advantages behaviour_logprobs sequence_ids position_ids policy_weight drafter_weight"
).split()


def make_samples(shapes, seed=0):
    """`shapes`: (prompt length, response length, share of holes in the response's mask) per sample."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, (prompt, response, holes) in enumerate(shapes):
        tokens = rng.integers(1, VOCABULARY, prompt + response)
        mask = np.concatenate([np.zeros(prompt), rng.random(response) >= holes]).astype(np.float32)
        logprobs = np.where(mask > 0, -rng.random(len(tokens)), np.nan).astype(np.float32)  # unknown where untrained
        samples.append(Sample(str(i), Prompt(i, tokens[:prompt]), tokens, mask, logprobs))
    return samples


def pack_all(samples, dp_size, cp_size, **options):
    """All ranks' batches: [dp_rank][cp_rank][micro-batch]."""
    options = {"depth": DEPTH, "tokens_per_micro_batch": 64} | options
    return [
        [pack(samples, dp_size=dp_size, dp_rank=d, cp_size=cp_size, cp_rank=c, **options) for c in range(cp_size)]
        for d in range(dp_size)
    ]


def flatten(ranks):
    return [batch for row in ranks for batches in row for batch in batches]


shapes = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 12), st.sampled_from([0.0, 0.3, 1.0])), min_size=0, max_size=9
)
parallel = {
    "dp_size": st.integers(1, 3),
    "cp_size": st.integers(1, 3),
    "multiple": st.sampled_from([1, 2, 3]),
    "budget": st.sampled_from([36, 72, 1000]),
    "seed": st.integers(0, 1000),
}


@given(shapes=shapes, **parallel)
@settings(max_examples=60)
def test_every_position(shapes, dp_size, cp_size, multiple, budget, seed):
    samples = make_samples(shapes, seed)
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=len(samples)).astype(np.float32).tolist()
    weights = rng.random(len(samples)).tolist()
    ranks = pack_all(
        samples,
        dp_size,
        cp_size,
        multiple=multiple,
        tokens_per_micro_batch=budget,
        advantages=advantages,
        drafter_weights=weights,
    )
    assert len({len(batches) for row in ranks for batches in row}) == 1
    seen = []
    for batch in flatten(ranks):
        total = int(batch.cu_seqlens_padded[-1])
        assert len(batch.tokens) == total // cp_size and len(batch.tokens) % multiple == 0 and 0 < total <= budget
        columns = {name: getattr(batch, name).tolist() for name in FIELDS}
        drafter = [
            [x[d].tolist() for x in (batch.drafter_tokens, batch.drafter_labels, batch.drafter_mask)]
            for d in range(DEPTH)
        ]
        for t in range(len(batch.tokens)):
            at = {name: column[t] for name, column in columns.items()}
            drafts = [[column[t] for column in depth] for depth in drafter]
            if at["sequence_ids"] < 0:
                assert at.pop("sequence_ids") == -1 and at.pop("position_ids") >= 0
                assert not any(at.values()) and not np.any(drafts)
                continue
            i, p = at["sequence_ids"], at["position_ids"]
            seen.append((i, p))
            sample, following = samples[i], p + 1 < len(samples[i].tokens)
            trained = following and sample.loss_mask[p + 1] == 1
            assert at["tokens"] == sample.tokens[p] and at["loss_mask"] == trained
            assert at["labels"] == (sample.tokens[p + 1] if following else 0)
            assert at["drafter_weight"] == np.float32(weights[i])
            for name, column in (
                ("advantages", np.full(len(sample.tokens), advantages[i])),
                ("behaviour_logprobs", sample.behaviour_logprobs),
                ("policy_weight", np.ones(len(sample.tokens))),
            ):
                assert at[name] == (column[p + 1] if trained else 0), name
            for d, (read, label, mask) in enumerate(drafts, 1):
                inside = p + 1 + d < len(sample.tokens)
                assert read == (sample.tokens[p + d] if p + d < len(sample.tokens) else 0)
                assert label == (sample.tokens[p + 1 + d] if inside else 0)
                assert mask == (inside and sample.loss_mask[p + 1 : p + 2 + d].all())
    # Nothing is lost and nothing doubled.
    assert sorted(seen) == [(i, p) for i, sample in enumerate(samples) for p in range(len(sample.tokens))]


# --- sums ----------------------------------------------------------------------------------------------------------


def losses_of(batches, aggregation_count, tables):
    """Policy and drafter losses of some ranks' batches: hidden states depend on (sample, position) alone."""
    hidden_table, head = tables
    policy, drafter = 0.0, 0.0
    for batch in batches:
        hidden = hidden_table[batch.sequence_ids, batch.position_ids]
        logprobs, _ = policy_logprobs(hidden, head, batch.labels, mask=batch.loss_mask, chunk=7)
        policy = policy - (logprobs * batch.policy_weight * batch.loss_mask).sum() / aggregation_count
        for d in range(DEPTH):
            draft = hidden_table[batch.sequence_ids, batch.position_ids, ...] * (d + 2)
            weight = batch.drafter_mask[d] * batch.drafter_weight.double() / batch.counts["drafter"][d]
            student = Student(draft, head, batch.drafter_labels[d], weight, chunk=7)
            student.learn_labels()
            drafter = drafter + student.finish()[0]
    return policy, drafter


def plain_losses(samples, aggregation, weights, tables, constant_length):
    """Compute the same by loops over unpacked samples."""
    hidden_table, head = tables
    per_sample, drafts = [], [[] for _ in range(DEPTH)]
    for i, sample in enumerate(samples):
        length = len(sample.tokens)
        logits = hidden_table[i, :length] @ head.t()
        tokens = torch.from_numpy(sample.tokens)
        per_sample.append(
            [-logits[p].log_softmax(-1)[tokens[p + 1]] for p in range(length - 1) if sample.loss_mask[p + 1]]
        )
        for d in range(1, DEPTH + 1):
            logq = ((d + 1) * logits).log_softmax(-1)
            for p in range(length - d - 1):
                if all(sample.loss_mask[p + 1 : p + 2 + d]):
                    drafts[d - 1].append((np.float32(weights[i]).item(), -logq[p, tokens[p + 1 + d]]))
    every = [x for rows in per_sample for x in rows]
    match aggregation:
        case "token":
            policy = sum(every) / max(len(every), 1)
        case "sample":
            policy = sum(sum(rows) / len(rows) for rows in per_sample if rows) / len(samples)
        case "constant":
            policy = sum(every) / (len(samples) * constant_length)
    drafter = sum(sum(w * x for w, x in rows) / sum(w for w, _ in rows) for rows in drafts if rows)
    return policy, drafter


@pytest.mark.parametrize("aggregation", ["token", "sample", "constant"])
def test_losses_and_gradients_do_not_depend_on_the_split(aggregation):
    samples = make_samples([(3, 9, 0), (1, 1, 0), (2, 0, 0), (4, 11, 0.3), (2, 5, 1), (1, 14, 0.2), (5, 3, 0)])
    weights = np.random.default_rng(1).random(len(samples)).tolist()
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(len(samples), 64, HIDDEN, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)

    def gradient(losses):
        leaf = table.clone().requires_grad_()
        policy, drafter = losses((leaf, head))
        (policy + 10 * drafter).backward()
        return torch.stack([policy.detach(), drafter.detach()]), leaf.grad

    expected, expected_gradient = gradient(lambda tables: plain_losses(samples, aggregation, weights, tables, 16))
    for dp_size, cp_size, budget, multiple in ((1, 2, 64, 1), (3, 1, 24, 4), (2, 3, 36, 2)):
        options = {"tokens_per_micro_batch": budget, "multiple": multiple}
        options |= {"aggregation": aggregation, "constant_length": 16, "drafter_weights": weights}
        batches = flatten(pack_all(samples, dp_size, cp_size, **options))
        got, got_gradient = gradient(
            lambda tables, batches=batches: losses_of(batches, batches[0].counts["policy"], tables)
        )
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=0)  # weights travel as float32
        torch.testing.assert_close(got_gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_counts_are_those_of_the_whole_step():
    samples = make_samples([(2, 6, 0), (3, 1, 0), (1, 0, 0)])
    for batch in flatten(pack_all(samples, 2, 2)):
        assert batch.counts == {"policy": 7.0, "drafter": [5.0, 4.0, 3.0], "tokens": 7.0, "samples": 3}
    sample_mean = pack(samples, depth=1, tokens_per_micro_batch=64, aggregation="sample")[0]
    assert sample_mean.counts["policy"] == 3
    constant = pack(samples, depth=1, tokens_per_micro_batch=64, aggregation="constant", constant_length=100)[0]
    assert constant.counts["policy"] == 300
    weighted = pack(samples, depth=2, tokens_per_micro_batch=64, drafter_weights=[0.5, 2, 2])[0]
    assert weighted.counts["drafter"] == [2.5, 2.0]


@pytest.mark.parametrize(("cp_size", "multiple"), [(1, 1), (2, 1), (2, 3), (2, 4), (4, 8)])
def test_samples_of_weight_0_are_left_out_of_the_drafters_batch(cp_size, multiple):
    samples = make_samples([(2, 7, 0.0), (3, 0, 0.0), (1, 12, 0.3), (4, 5, 0.0), (2, 9, 0.0)])
    weights = [1.0, 1.0, 0.0, 0.5, 0.0]
    dp_size = 1 if multiple > 1 else 2  # several samples in a batch, whose end is padded for the sake of `multiple`
    ranks = pack_all(samples, dp_size, cp_size, drafter_weights=weights, multiple=multiple, tokens_per_micro_batch=192)
    alone = pack([samples[i] for i in (0, 1, 3)], depth=DEPTH, tokens_per_micro_batch=64)
    assert flatten(ranks)[0].counts["drafter"] == pytest.approx(
        [float(sum(w * float(m.sum()) for w, m in _weighted(alone, [1.0, 1.0, 0.5], d))) for d in range(DEPTH)]
    )
    seen = []
    for batch in flatten(ranks):
        part, rows = batch.drafter_part, batch.drafter_rows
        real = part.sequence_ids >= 0
        seen += part.sequence_ids[real].tolist()
        assert len(part.tokens) <= max(len(batch.tokens), cp_size * multiple) and rows[~real].eq(0).all()
        for name in ("tokens", "sequence_ids", "position_ids", "drafter_weight"):
            assert torch.equal(getattr(part, name)[real], getattr(batch, name)[rows[real]])
        for name in ("drafter_tokens", "drafter_labels", "drafter_mask"):
            for ours, theirs in zip(getattr(part, name), getattr(batch, name), strict=True):
                assert torch.equal(ours[real], theirs[rows[real]])
    assert sorted(seen) == sorted(i for i in (0, 1, 3) for _ in samples[i].tokens)
    assert all(batch.drafter_part is None for batch in flatten(pack_all(samples, 2, cp_size)))


def _weighted(batches, weights, depth):
    return [
        (weights[i], batch.drafter_mask[depth][batch.sequence_ids == i])
        for batch in batches
        for i in range(len(weights))
    ]


def test_nothing_trained_divides_by_one():
    samples = make_samples([(4, 0, 0), (1, 1, 1.0)])
    for batch in flatten(pack_all(samples, 2, 1)) + flatten(pack_all([], 2, 2)):
        assert batch.counts["policy"] == 1 and batch.counts["drafter"] == [1, 1, 1]
        assert not batch.loss_mask.any() and not any(mask.any() for mask in batch.drafter_mask)


def test_ranks_without_work_get_padding_only():
    ranks = pack_all(make_samples([(1, 3, 0)]), 3, 2, multiple=4)
    assert [len(row[0]) for row in ranks] == [1, 1, 1]
    assert [row[0][0].sequence_ids.max().item() for row in ranks] == [0, -1, -1]
    idle = ranks[2][1][0]
    assert idle.cu_seqlens.tolist() == [0, 0] and idle.cu_seqlens_padded.tolist() == [0, 8] and len(idle.tokens) == 4


# --- partition -----------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 50), max_size=40), budget=st.integers(50, 200), multiple=st.integers(1, 4))
@settings(max_examples=300)
def test_partition_is_complete_within_budget_and_balanced(lengths, budget, multiple):
    bins = partition(lengths, budget, multiple)
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in chosen) for chosen in bins]
    assert len(bins) % multiple == 0 and max(loads) <= budget
    assert max(loads) - min(loads) <= max(lengths, default=0)  # else the last item would have gone elsewhere
    assert loads == sorted(loads, reverse=True)
    # No more bins than twice the least possible: two of them together exceed the budget.
    assert len(bins) < 2 * sum(lengths) / budget + 1 + multiple


def test_partition_names_the_sample_that_does_not_fit():
    with pytest.raises(ValueError, match="sample 1 takes 70 tokens, but a micro-batch holds 64"):
        partition([3, 70], 64)
