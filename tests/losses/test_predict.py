import itertools

import numpy as np
import pytest
import torch

from megatron_rlspec.losses import predict
from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.losses.predict import accept_and_reach, deepen, logq_of_rows
from megatron_rlspec.speculation import ragged
from megatron_rlspec.speculation.acceptance import Prediction

V, DEPTH = 6, 3


def walk(accept, reach, mask, steps):
    reached, accepted, _ = predict.walk(accept, reach, mask, steps)
    return Prediction(tuple(steps), reached.numpy()[None], accepted.numpy()[None])


def masks(lengths, depth=DEPTH, gap=2):
    """[T, depth] masks of responses of these many generated tokens, as `drafter_targets` lays them out."""
    rows = []
    for length in lengths:
        rows += [[float(t + 1 + d < length) for d in range(1, depth + 1)] for t in range(length)]
        rows += [[0.0] * depth] * gap
    return torch.tensor(rows)


def test_the_mean_over_positions_is_biased_and_the_walk_is_not():
    """Half the text accepts with 0.95, half with 0.1, in long stretches; truth: rounds that are actually played."""
    rng = np.random.default_rng(0)
    length = 100_000
    rate = np.where(np.arange(length + DEPTH + 2) // 1000 % 2, 0.1, 0.95)
    match = rng.random(len(rate)) < rate  # whether the drafter's token equals the text's, by position
    shifted = [slice(d, d + length) for d in range(1, DEPTH + 1)]
    accept = torch.tensor(np.stack([rate[s] for s in shifted], axis=1))
    reach = torch.tensor(np.stack([match[s] for s in shifted], axis=1), dtype=torch.float64)
    mask = torch.ones(length, DEPTH)

    fresh = rng.random(len(rate)) < rate  # another text with the same stretches
    position = rounds = 0
    while position < length:
        accepted = next((j for j in range(DEPTH) if not fresh[position + 1 + j]), DEPTH)
        position, rounds = position + 1 + accepted, rounds + 1
    truth = position / rounds
    assert truth == pytest.approx(1.71, abs=0.02)

    naive = 1 + torch.cumprod(accept, dim=1).sum(dim=1).mean().item()
    assert naive == pytest.approx(2.41, abs=0.02)
    assert walk(accept, reach, mask, [3]).tokens_per_round(3) == pytest.approx(truth, abs=0.02)


def accept_probabilities(target, draft_logits, tokens):
    """Return (accept, reach) `[N]` of the argmax of `draft_logits [N, V]`, where the text has `tokens [N]`.

    accept  the chance that a token drawn from `target [N, V]` is the draft
    reach   whether the text's token is
    """
    best = draft_logits.argmax(-1)
    return target.gather(-1, best[:, None])[:, 0], (best == tokens).to(target.dtype)


def test_against_every_path_of_a_short_sequence():
    """The walk's start probabilities, by enumerating all outcomes of all rounds."""
    g = torch.Generator().manual_seed(3)
    length, steps = 9, 2
    mask = masks([length], depth=2, gap=0)
    accept, reach = torch.rand(length, 2, generator=g) * mask, torch.rand(length, 2, generator=g) * mask
    reached, accepted = np.zeros(2), np.zeros(2)

    def play(t, weight):
        if t >= length or mask[t, 0] == 0 or weight == 0:
            return
        carried = weight
        for d in range(steps + 1):
            more = float(reach[t, d]) if d < steps else 0.0
            if d < steps and mask[t, d]:
                reached[d] += carried
                accepted[d] += carried * float(accept[t, d])
            play(t + 1 + d, carried * (1 - more))
            carried *= more

    play(0, 1.0)
    found = walk(accept, reach, mask, [steps])
    assert found.reached[0, 0] == pytest.approx(reached)
    assert found.accepted[0, 0] == pytest.approx(accepted)


def test_packing_order_and_neighbours_do_not_matter():
    g = torch.Generator().manual_seed(4)
    lengths = [40, 7, 1, 90, 3]
    pieces = []
    for length in lengths:
        mask = masks([length])
        pieces.append((torch.rand(mask.shape, generator=g), torch.rand(mask.shape, generator=g), mask))
    alone = [walk(*piece, [1, 3]) for piece in pieces]
    summed = alone[0]
    for other in alone[1:]:
        summed = summed + other
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        together = walk(*(torch.cat([pieces[i][c] for i in order]) for c in range(3)), [1, 3])
        assert together.reached == pytest.approx(summed.reached)
        assert together.accepted == pytest.approx(summed.accepted)


def test_nothing_to_predict_from_is_zero_not_nan():
    empty = walk(torch.rand(5, 2), torch.rand(5, 2), torch.zeros(5, 2), [1, 2])
    assert empty.rates(2) == [0.0, 0.0] and empty.tokens_per_round(2) == 1.0
    rows = {name: torch.zeros(0) for name in ("match", "argmax_prob", "best_logq")}
    for table in (*accept_and_reach(rows, DEPTH, sampled=True), logq_of_rows(rows, DEPTH)):
        assert table.shape == (0, DEPTH, 1)
    assert walk(torch.rand(0, 2), torch.rand(0, 2), torch.zeros(0, 2), [2]).tokens_per_round(2) == 1.0


def test_rows_kept_by_the_training_step_are_the_direct_ones():
    """What the loss saw in chunks, in its own order, against `accept_probabilities` on whole logits."""
    g = torch.Generator().manual_seed(3)
    positions, hidden_size = 40, 8
    hidden = torch.randn(DEPTH * positions, hidden_size, generator=g)
    teacher = torch.randn(positions + DEPTH, hidden_size, generator=g)
    head = torch.randn(V, hidden_size, generator=g)
    labels = torch.randint(0, V, (DEPTH * positions,), generator=g)
    weight = (torch.rand(DEPTH * positions, generator=g) < 0.7).float()
    index = torch.cat([torch.arange(positions) + d for d in range(1, DEPTH + 1)])
    student = Student(
        hidden, head, labels, weight, "forward_kl", teacher_index=index, temperature=0.7, chunk=16, keep_rows=True
    )
    student.learn_from(teacher)
    student.finish()
    accept, reach = accept_and_reach(student.rows, DEPTH, sampled=True)
    target = (teacher[index] @ head.T / 0.7).softmax(-1)
    expected = accept_probabilities(target, hidden @ head.T, labels)
    for got, want in zip((accept, reach), expected, strict=True):
        want = torch.where(weight != 0, want, 0.0).view(DEPTH, positions).T
        torch.testing.assert_close(got[..., 0], want, atol=1e-5, rtol=1e-4)
    best = (hidden @ head.T / 0.7).log_softmax(-1).amax(-1)
    want = torch.where(weight != 0, best, 0.0).view(DEPTH, positions).T
    torch.testing.assert_close(logq_of_rows(student.rows, DEPTH)[..., 0], want, atol=1e-5, rtol=1e-4)


def test_a_refused_coupled_draft_is_taken_to_be_the_likeliest_token():
    rows = {"label_logq": torch.tensor([-0.5, -3.0]), "best_logq": torch.tensor([-0.5, -0.2])}
    rows["coupled"] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert logq_of_rows(rows, 1)[:, 0].tolist() == [[-0.5, -0.5], pytest.approx([-0.2, -3.0])]
    del rows["coupled"]
    assert logq_of_rows(rows, 1)[:, 0, 0].tolist() == pytest.approx([-0.5, -0.2])


def test_drafts_are_counted_by_log_q_where_played_rounds_make_them():
    """Against rounds that are played: how often drafts of some log q were reached and right."""
    rng = np.random.default_rng(4)
    length = 30_000
    logq = -rng.exponential(0.5, (length, DEPTH))
    right = rng.random(logq.shape) < np.exp(1.5 * logq)
    mask = np.ones((length, DEPTH))
    tensors = [torch.tensor(part, dtype=torch.float64) for part in (right, right, mask)]
    *_, starts = predict.walk(*tensors, [DEPTH])
    found = predict.by_logq(torch.tensor(logq), *tensors, starts).numpy()
    played = np.zeros_like(found)
    position = 0
    while position < length:
        for depth in range(DEPTH):
            reached = right[position, :depth].all()
            here = ragged.cells_of(logq[position, depth]) * ragged.BINS // ragged.CELLS
            played[:, here] += reached, reached & right[position, depth]
        position += 1 + int(np.cumprod(right[position]).sum())
    # the two spacings of bins differ by 1 % of a bin
    assert np.abs(found - played).sum() < 0.01 * played.sum()
    assert (found[0] >= found[1]).all()


def test_depths_below_the_trained_ones_follow_the_deepest():
    """A drafter whose rates stay the same from depth 2 on: predicting from two trained depths misses nothing."""
    rng = np.random.default_rng(1)
    length, wanted = 60_000, 5
    mask = masks([length], depth=wanted)
    rates = np.where(np.arange(len(mask) + wanted + 2) // 500 % 2, 0.3, 0.9)
    match = rng.random(len(rates)) < rates
    shifted = [slice(d, d + len(mask)) for d in range(1, wanted + 1)]
    accept = torch.tensor(np.stack([rates[s] for s in shifted], 1))
    reach = torch.tensor(np.stack([match[s] for s in shifted], 1), dtype=torch.float64)
    whole = walk(accept, reach, mask, [5])
    two = walk(*(deepen(part[:, :2], wanted) for part in (accept, reach, mask)), [5])
    assert two.rates() == pytest.approx(whole.rates(), abs=0.003)
    assert torch.equal(deepen(mask[:, :2], wanted), mask)
