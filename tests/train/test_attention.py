"""Packed attention equals the textbook formula in float64, on each of its paths, and needs memory linear in T."""

import contextlib
import functools
import itertools
import math
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from host_reads import CPU, GPU, HostReads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rlspec.models.rope import Rope
from megatron_rlspec.packing.context_parallel import cp_index
from megatron_rlspec.train import attention, varlen
from megatron_rlspec.train.attention_plan import plan_attention


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def oracle(lengths, q, k, v, links, scale):
    """Compute causal attention of each sequence, whose row i also attends to row i of each (key, value) of `links`."""
    outs = []
    for q_s, k_s, v_s, *links_s in zip(*(x.split(lengths) for x in (q, k, v, *links)), strict=True):
        k_s, v_s, *links_s = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_s, v_s, *links_s))
        hidden = torch.ones(len(q_s), len(q_s), device=q.device).triu(1).bool()
        scores = torch.einsum("inc,jnc->inj", q_s, k_s).masked_fill(hidden[:, None], -math.inf)
        own = [torch.einsum("inc,inc->in", q_s, key)[..., None] for key in links_s[::2]]
        p = (torch.cat([scores, *own], -1) * scale).softmax(-1)
        out = torch.einsum("inj,jnc->inc", p[..., : len(q_s)], v_s)
        outs.append(out + sum(p[..., len(q_s) + i, None] * value for i, value in enumerate(links_s[1::2])))
    return torch.cat(outs)


def bounds(cu_q, cu_k):
    q, k = cu_q.tolist(), cu_k.tolist()
    return zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)


def exactly(*tensors):
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def operator_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
    """Do what `aten::_flash_attention_forward` does with packed sequences, written down from its contract."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and (dropout, causal, debug) == (0.0, True, False)
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    dtype = q.dtype
    q, k, v = exactly(q, k, v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], len(q))
    for q0, q1, k0, k1 in bounds(cu_q, cu_k):
        repeat = q.shape[1] // k.shape[1]
        scores = torch.einsum("inc,jnc->nij", q[q0:q1], k[k0:k1].repeat_interleave(repeat, 1)) * scale
        seen = torch.ones(q1 - q0, k1 - k0).tril((k1 - k0) - (q1 - q0)).bool()  # the last row sees the last key
        scores = scores.masked_fill(~seen, -math.inf)
        lse[:, q0:q1] = scores.logsumexp(-1)
        out[q0:q1] = torch.einsum("nij,jnc->inc", scores.softmax(-1), v[k0:k1].repeat_interleave(repeat, 1))
    unused = torch.empty(2, dtype=torch.uint64)
    return out.to(dtype), lse, unused, unused, unused


def operator_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused, *, scale):
    """Do what `aten::_flash_attention_backward` does: p = exp(score - lse), delta = grad · out."""
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and (dropout, causal) == (0.0, True)
    dtype = q.dtype
    grad, q, k, v, out = exactly(grad, q, k, v, out)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    delta = (grad * out).sum(-1).T
    for q0, q1, k0, k1 in bounds(cu_q, cu_k):
        key, value = (x[k0:k1].repeat_interleave(repeat, 1) for x in (k, v))
        p = torch.exp(torch.einsum("inc,jnc->nij", q[q0:q1], key) * scale - lse[:, q0:q1, None])
        p = p * torch.ones(q1 - q0, k1 - k0).tril((k1 - k0) - (q1 - q0))
        ds = p * (torch.einsum("inc,jnc->nij", grad[q0:q1], value) - delta[:, q0:q1, None]) * scale
        dq[q0:q1] = torch.einsum("nij,jnc->inc", ds, key)
        dk[k0:k1] = torch.einsum("nij,inc->jnc", ds, q[q0:q1]).unflatten(1, (-1, repeat)).sum(2)
        dv[k0:k1] = torch.einsum("nij,inc->jnc", p, grad[q0:q1]).unflatten(1, (-1, repeat)).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


FLASH = {"_flash_attention_forward": operator_forward, "_flash_attention_backward": operator_backward}


@contextlib.contextmanager
def path(name, monkeypatch):
    """Let attention take one of its three paths on the CPU; yield the argument that chooses the plan."""
    if name == "batched":
        yield True
    elif name == "blocks":
        monkeypatch.setattr(varlen, "_BLOCK", 200)  # several blocks a sequence, the last one shorter
        yield False
    else:
        monkeypatch.setattr(varlen, "_has_flash", lambda q: True)
        with HostReads(operators=FLASH):
            yield False


@functools.cache
def case(depth):
    """Return inputs of one depth of the drafter, and what the textbook makes of them."""
    lengths = [8, 16, 0, 24, 8]
    scale = 0.37
    q = random(56, 6, 8, seed=1)
    keys = [random(56, 2, 8, seed=2 + i) for i in range(2 * depth)]
    expected = oracle(lengths, q, *keys[:2], keys[2:], scale)
    weight = random(56, 6, 8, seed=99).detach()
    grads = torch.autograd.grad((expected * weight).sum(), (q, *keys))
    return torch.tensor([0, *lengths]).cumsum(0), scale, (q, *keys), weight, expected.detach(), grads


KERNELS = [("batched", 1), *itertools.product(["blocks", "flash"], [1, 2, 4])]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("kernel", "cp_size"), KERNELS)
def test_packed_attention_equals_the_textbook_formula(cp_size, depth, kernel, monkeypatch):
    cu, scale, inputs, weight, expected, grads = case(depth)
    q, k, v, *links = inputs
    got = [torch.zeros_like(x) for x in inputs]
    gathered = torch.cat([cp_index(cu, rank, cp_size) for rank in range(cp_size)])
    with path(kernel, monkeypatch) as batched:
        for rank in range(cp_size):
            mine = cp_index(cu, rank, cp_size)
            plan = plan_attention(cu, 2, cp_size, rank, q.device, batched=batched)
            out = attention._Attend.apply(q[mine], k[gathered], v[gathered], plan, scale, *(x[mine] for x in links))
            torch.testing.assert_close(out, expected[mine], rtol=1e-12, atol=1e-12)
            shares = torch.autograd.grad((out * weight[mine]).sum(), inputs)
            for total, share in zip(got, shares, strict=True):
                total += share
    for ours, reference in zip(got, grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-12)


def test_gradients_in_bfloat16_are_little_worse_than_their_rounding():
    """torch's own kernel for bfloat16 on CPUs is twice as far from float64."""
    cu = torch.tensor([0, 64, 160])
    inputs = [random(160, n, 64, seed=i).detach().bfloat16().requires_grad_() for i, n in enumerate((4, 2, 2))]
    weight = random(160, 4, 64, seed=9).detach().bfloat16()
    plan = plan_attention(cu, 2, 1, 0, CPU, batched=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(oracle([64, 96], *exact, [], 0.125), exact, weight.double())
    for ours, reference in zip(
        torch.autograd.grad(attention._Attend.apply(*inputs, plan, 0.125), inputs, weight), expected, strict=True
    ):
        rounding = (reference.bfloat16() - reference).norm()
        assert (ours - reference).norm() < 1.6 * rounding, (ours - reference).norm() / rounding


def meta_plan(lengths, groups, cp_size=1):
    plan = plan_attention(torch.tensor([0, *lengths]).cumsum(0), groups, cp_size, 0, CPU, batched=False)
    return replace(plan, **{name: x.to("meta") for name, x in vars(plan).items() if isinstance(x, torch.Tensor)})


class Counted(TorchDispatchMode):
    """Counts operators by name, and the bytes that they allocate: those that live `now`, and their `peak`."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return out

    def freed(self, key, size):
        self.seen.discard(key)
        self.now -= size


def both_passes(plan, dtype, shape, keys, links):
    """Run attention on tensors without values that say that they are on a GPU; return all tensors, reads, memory."""
    inputs = [torch.empty(s, dtype=dtype, device="meta") for s in (shape, keys, keys, *[(shape[0], *keys[1:])] * links)]
    with HostReads() as reads, Counted() as live:
        reads.put(inputs, list(vars(plan).values()))
        for x in inputs:
            x.requires_grad_()
        out = attention._Attend.apply(*inputs[:3], plan, 0.1, *inputs[3:])
        grads = torch.autograd.grad(out, inputs, torch.empty_like(out))
        assert all(x.device == GPU for x in (*inputs, out, *grads)) and not reads.found
    return inputs, (out, *grads), live


@pytest.mark.parametrize("cp_size", [1, 2])
def test_shapes_and_types_on_a_gpu(cp_size):
    plan = meta_plan([64, 0, 192], groups=2, cp_size=cp_size)
    inputs, results, live = both_passes(plan, torch.bfloat16, (256 // cp_size, 4, 64), (256, 2, 64), links=4)
    for x, y in zip(results, (inputs[0], *inputs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, torch.bfloat16)
    assert live.calls["_flash_attention_forward"] == live.calls["_flash_attention_backward"] == 1


def peak(tokens, *, links=0, dtype=torch.bfloat16):
    """Return the GiB of one attention of MiMo's at TP 2, forward and backward, beyond its inputs."""
    *_, live = both_passes(meta_plan([tokens], 4), dtype, (tokens, 16, 128), (tokens, 4, 128), 2 * links)
    return live.peak / 2**30


@pytest.mark.parametrize("links", [0, 3])
def test_memory_on_a_gpu_is_linear_in_the_tokens(links):
    short = peak(9216, links=links)
    long = peak(32768, links=links)
    assert long / short == pytest.approx(32768 / 9216, rel=0.01)
    queries = 9216 * 16 * 128 * 2 / 2**30
    # Output, its gradient, dq, and the keys' gradients; the chain's keys are joined in 32 bits.
    assert short < (20 if links else 5) * queries
    print(f"links {links}: {short:.2f} GiB at 9,216 tokens, {long:.2f} at 32,768; scores alone were 15 and 193")


def test_rotation_follows_transformers_convention():
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    x = random(5, 3, 8, seed=1)
    positions = torch.tensor([0, 1, 7, 3, 1000])
    cos, sin = attention.rotary_factors(positions, 8, Rope(), torch.float64)
    full_cos, full_sin = (torch.cat([y, y], -1)[None, :, 0] for y in (cos, sin))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], full_cos, full_sin)
    ours = attention._Rotate.apply(x, cos, sin)
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(attention._Rotate.apply, (x, cos, sin))


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("links", [0, 1, 3])
def test_flash_attention_on_a_gpu_equals_the_textbook_formula(links, cp_size):
    assert torch.cuda.is_available(), "no CUDA device"
    lengths = [512, 4, 1028, 0, 256, 200]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = [(2000, 8, 128), *[(2000, 2, 128)] * (2 + 2 * links)]
    inputs = [torch.randn(s, generator=draw, device="cuda").bfloat16().requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle(lengths, *exact[:3], exact[3:], 128**-0.5)
    weight = torch.randn(shapes[0], generator=draw, device="cuda").bfloat16()
    grads = torch.autograd.grad((expected * weight).sum(), exact)
    got = [torch.zeros_like(x) for x in exact]
    gathered = torch.cat([cp_index(cu, rank, cp_size) for rank in range(cp_size)]).cuda()
    for rank in range(cp_size):
        mine = cp_index(cu, rank, cp_size).cuda()
        plan = plan_attention(cu, 2, cp_size, rank, torch.device("cuda"))
        q, k, v, *chain = inputs
        keys, values = k[gathered], v[gathered]
        out = attention._Attend.apply(q[mine], keys, values, plan, 128**-0.5, *(x[mine] for x in chain))
        assert distance(out, expected[mine]) < 4e-3
        for total, share in zip(got, torch.autograd.grad((out * weight[mine]).sum(), inputs), strict=True):
            total += share
    errors = [distance(ours, reference) for ours, reference in zip(got, grads, strict=True)]
    print("relative error of each gradient:", *(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-2, "bfloat16 rounds by 2e-3 to 4e-3"


def distance(x, reference):
    return ((x.double() - reference).norm() / reference.norm()).item()
