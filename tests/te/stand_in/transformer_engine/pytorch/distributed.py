"""Random streams, recomputation, and the four collectives of tensor parallelism with their adjoints."""

import contextlib

import torch
import torch.distributed as dist
import torch.utils.checkpoint


class CudaRNGStatesTracker:
    """Megatron derives a class from this when it is imported; it uses its own tracker unless told otherwise."""


def get_all_rng_states():
    raise NotImplementedError("Transformer Engine's random streams are not used")


class activation_recompute_forward(contextlib.AbstractContextManager):  # noqa: N801
    def __init__(self, activation_recompute=False, recompute_phase=False):
        assert not activation_recompute, "FP8 recomputation"

    def __exit__(self, *_):
        return None


def checkpoint(
    function,
    *args,
    distribute_saved_activations=False,
    get_rng_state_tracker=None,
    tp_group=None,
    use_reentrant=True,
    **kwargs,
):
    assert not distribute_saved_activations
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def set_tensor_model_parallel_attributes(tensor, is_parallel, dim, stride):
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride


def all_reduce(x, group):
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def gather(x, group):
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x, group):
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Collective(torch.autograd.Function):
    """One collective forward, another backward; None means neither."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group = group
        ctx.backward_collective = backward
        return forward(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        back = ctx.backward_collective
        return back(grad, ctx.group) if back else grad, None, None, None


def into_column(x, group, sequence_parallel):
    """A column-parallel layer's input: every rank needs all of it, and each makes a part of its gradient."""
    if sequence_parallel:
        return _Collective.apply(x, group, gather, reduce_scatter)
    return _Collective.apply(x, group, None, all_reduce)


def out_of_row(x, group, sequence_parallel):
    """A row-parallel layer's output: each rank has a term of the sum."""
    if sequence_parallel:
        return _Collective.apply(x, group, reduce_scatter, gather)
    return _Collective.apply(x, group, all_reduce, None)


def gather_rows(x, group):
    """Rows of all ranks, each of which uses all of them."""
    return _Collective.apply(x, group, gather, reduce_scatter)
