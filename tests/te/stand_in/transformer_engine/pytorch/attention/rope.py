"""Rotary embedding, as the fused kernel takes it."""

import torch


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    assert fused and tensor_format == "thd" and start_positions is None and not interleaved
    assert freqs.dtype == torch.float32, "the kernel reads float32 angles"
    angles = freqs[:, 0, 0]
    positions = []
    for length in (cu_seqlens[1:] - cu_seqlens[:-1]).tolist():
        chunk = length // (2 * cp_size) if cp_size > 1 else length
        starts = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        positions += [torch.arange(start * chunk, (start + 1) * chunk) for start in starts]
    angles = angles[torch.cat(positions)][:, None]
    turned, rest = t[..., : angles.shape[-1]], t[..., angles.shape[-1] :]
    first, second = turned.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    return torch.cat([(turned * angles.cos() + half * angles.sin()).to(t.dtype), rest], -1)
