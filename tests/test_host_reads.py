"""The audit of host reads sees what a GPU would wait for, and nothing else."""

import pytest
import torch
from host_reads import GPU, HostReads

HERE = "test_host_reads.py:"


def by_item(x):
    return float(x.sum())


def by_mask(x):
    return x[x > 0]


def by_branch(x):
    return 1 if x.any() else 2


def by_copy(x):
    return x.cpu() * 2


def by_copy_into(x):
    return torch.empty(4).copy_(x)


def by_copy_into_without_waiting(x):
    return torch.empty(4).copy_(x, non_blocking=True)


def by_list(x):
    return x.to(torch.int64).tolist()


def by_numpy(x):
    return x.detach().numpy()


def by_repetition(x):
    return torch.repeat_interleave(x, torch.ones_like(x, dtype=torch.int64))


def to_and_fro(x):
    return torch.zeros(4).pin_memory().to(x.device, non_blocking=True) + x.to("cpu", non_blocking=True).to(
        x.device, non_blocking=True
    )


READS = {
    by_item: "item",
    by_mask: "boolean index",
    by_branch: "item",
    by_copy: "copy to the CPU",
    by_copy_into: "copy to the CPU",
    by_copy_into_without_waiting: "copy without waiting",
    by_list: "tolist",
    by_numpy: "numpy",
    by_repetition: "repeat_interleave",
    to_and_fro: "copy without waiting",
    torch.nonzero: "nonzero",
}


def no_read(x):
    y = torch.where(x > 0, x, 0.0).cumsum(0)
    y[x > 2] = 0
    return y.index_select(0, torch.arange(2, device=x.device)) + torch.tensor(3.0)


@pytest.mark.parametrize("work", READS, ids=lambda work: work.__name__)
def test_a_read_is_found_where_it_happens_and_only_on_the_gpu(work):
    values = [1.0, 2.0, 0.0, 4.0]
    with HostReads() as reads:
        work(torch.tensor(values))
        assert not reads.found
        there = torch.tensor(values, device="cuda")
        reads.found.clear()
        work(there)
    name = "test_a_read_is_found_where_it_happens_and_only_on_the_gpu" if work is torch.nonzero else work.__name__
    assert dict(reads.found) == {f"{HERE}{name}: {READS[work]}": 1}


def test_work_that_stays_on_the_gpu_is_no_read():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with HostReads() as reads:
        there = x.to(GPU)
        assert list(reads.found) == [f"{HERE}test_work_that_stays_on_the_gpu_is_no_read: waiting copy to the GPU"]
        reads.found.clear()
        out = no_read(there)
        assert (there.device, x.device, out.device) == (GPU, torch.device("cpu"), GPU)
    assert not reads.found and not reads.misplaced
    torch.testing.assert_close(out, no_read(x))


def test_a_read_in_a_backward_pass_is_found():
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda
            return grad * grad.sum().item() * grad.tolist()[0][0]

    with HostReads() as reads:
        model = torch.nn.Linear(3, 1).to("cuda")
        reads.found.clear()
        Reading.apply(model(torch.ones(2, 3, device="cuda"))).sum().backward()
        torch.autograd.grad(Reading.apply(model(torch.ones(2, 3, device="cuda"))).sum(), model.parameters())
    assert {name.split(".")[-1]: count for name, count in reads.found.items()} == {
        "backward: item": 2,
        "backward: tolist": 2,
    }


def test_tensors_of_both_devices_in_one_operator_are_misplaced():
    with HostReads() as reads:
        torch.ones(3, device="cuda") + torch.ones(3)
    assert list(reads.misplaced) == [f"{HERE}test_tensors_of_both_devices_in_one_operator_are_misplaced: add"]


def test_an_operator_without_cpu_kernel_can_be_replaced():
    with HostReads(operators={"sin": lambda x: x + 1}) as reads:
        out = torch.zeros(2, device="cuda").sin()
        assert reads.holds(out)
    assert out.tolist() == [1.0, 1.0]
