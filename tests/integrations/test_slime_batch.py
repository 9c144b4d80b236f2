"""The drafter's fields from slime's layouts equal those of a loop over whole sequences, for CP 1, 2 and 4."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.cotrainer.fields import drafter_fields
from megatron_rlspec.integrations.slime.batch import micro_batch, trained_tokens

LENGTHS = (23, 14, 17, 9)
RESPONSES = (15, 6, 3, 9)
SEEDS = (2**31 - 1, 7, 0, 12)
DEPTH = 3
PAD = 8


def samples():
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 100, (n,), generator=generator) for n in LENGTHS]
    masks = [(torch.rand(n, generator=generator) > 0.2).int() for n in RESPONSES]
    return tokens, masks


def laid_out(cp):
    """Return the widths of slime's sequences before the split, with its padding segment (`get_batch` in data.py)."""
    widths = [2 * cp * -(-n // (2 * cp)) if cp > 1 else n for n in LENGTHS]
    pad = (-(sum(widths) // cp) % PAD) * cp
    return widths + ([pad] if pad else [])


def positions(widths, rank, cp):
    """Return the global positions that `rank` holds, in its order, chunk by chunk."""
    if cp == 1:
        return list(range(sum(widths)))
    out = []
    start = 0
    for width in widths:
        chunk = width // (2 * cp)
        for part in (rank, 2 * cp - 1 - rank):
            out += range(start + part * chunk, start + (part + 1) * chunk)
        start += width
    return out


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_fields_of_every_rank(cp):
    tokens, masks = samples()
    widths = laid_out(cp)
    cu = torch.tensor([0, *widths]).cumsum(0).int()
    batch = {"unconcat_tokens": tokens, "loss_masks": masks, "packed_seq_params": SimpleNamespace(cu_seqlens_q=cu)}
    trained = [0] * DEPTH
    for rank in range(cp):
        sequences = micro_batch(batch, seeds=SEEDS)
        fields = drafter_fields(sequences, DEPTH, cp_rank=rank, cp_size=cp)
        for local, position in enumerate(positions(widths, rank, cp)):
            i = int(torch.searchsorted(cu[1:], position, right=True))
            t = position - int(cu[i])
            assert fields.position_ids[local] == fields.positions[local] == t
            assert fields.seeds[local] == (SEEDS[i] if i < len(LENGTHS) and t < LENGTHS[i] else -1)
            for d in range(1, DEPTH + 1):
                response = [t + s - (LENGTHS[i] - RESPONSES[i]) for s in range(1, d + 2)] if i < len(LENGTHS) else [-1]
                right = all(0 <= r < RESPONSES[i] and masks[i][r] for r in response)
                assert bool(fields.weight[d - 1][local]) == right, (rank, position, d)
                if right:
                    assert fields.tokens[d - 1][local] == tokens[i][t + d]
                    assert fields.labels[d - 1][local] == tokens[i][t + 1 + d]
                    trained[d - 1] += 1
    data = {"total_lengths": LENGTHS, "loss_masks": masks}
    assert trained_tokens(data, range(len(LENGTHS)), DEPTH) == trained
    assert trained[0] > trained[1] > trained[2] > 0


def test_all_fields_are_on_the_device_of_the_samples():
    """As slime's samples are on a GPU. The drafter's step combines seeds with weights, and reads both by one index."""
    tokens, masks = ([x.to("meta") for x in column] for column in samples())
    cu = torch.tensor([0, *laid_out(2)]).cumsum(0).int()
    batch = {"unconcat_tokens": tokens, "loss_masks": masks, "packed_seq_params": SimpleNamespace(cu_seqlens_q=cu)}
    fields = drafter_fields(micro_batch(batch, seeds=SEEDS), DEPTH, cp_size=2)
    found = [*fields.tokens, *fields.labels, *fields.weight, fields.position_ids, fields.seeds, fields.positions]
    assert {(x.device.type, len(x)) for x in found} == {("meta", int(cu[-1]) // 2)}


def test_acceptance_is_predicted_at_a_part_of_many_tokens():
    """8,192 of a step's tokens, at the beginning of every 1,024 positions, at the same ones on every rank."""
    length = 4096
    cu = torch.tensor([0, length]).int()
    tokens = [torch.ones(length, dtype=torch.int64)]
    batch = {"unconcat_tokens": tokens, "loss_masks": [torch.ones(9)], "packed_seq_params": SimpleNamespace()}
    batch["packed_seq_params"].cu_seqlens_q = cu
    fields = drafter_fields(micro_batch(batch, seeds=[5]), 1, [16 * 8192.0])
    assert (fields.seeds == 5).sum() == 4 * 64 and bool((fields.seeds[1024:1088] == 5).all())
    assert drafter_fields(micro_batch(batch), 1).seeds is None
