"""Bytes of logits that a loss moves in a GPU's memory, counted at an 8B model's size on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rlspec.kernels import chosen
from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.losses.logprobs import policy_logprobs

pytest.importorskip("triton", reason="Triton is not installed; there are no kernels to count")
ROWS, WORDS, HIDDEN = 1024, 151_680, 4096
FEW = ("aten.gather", "aten.index.")  # read single elements of what they are given


class Bytes(TorchDispatchMode):
    """Counts the bytes of logits that operations and kernels read and write, and of the output layer's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = self.weights = 0

    def moved(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.shape in ((ROWS, WORDS), (WORDS, ROWS)):
                self.logits += tensor.numel() * tensor.element_size()
            elif tensor.shape == (WORDS, HIDDEN):
                self.weights += tensor.numel() * tensor.element_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = "empty" in str(func) or "zeros" in str(func)
        if not func.is_view and not new:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            product = "mm" in str(func)  # its other operand is the weight
            read = [x for x in given if not (product and x.shape[-1] == HIDDEN or product and x.shape[0] == HIDDEN)]
            self.moved(*([] if str(func).startswith(FEW) else read))
            self.moved(*[x for x in tree_leaves(result) if isinstance(x, torch.Tensor)])
        return result


class Launches:
    """In place of a kernel: adds what a launch reads and writes, which `test_loss_passes.py` counts."""

    def __init__(self, bytes_: Bytes, kernel: Any) -> None:
        self._bytes, self._names = bytes_, kernel.arg_names

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **constants: Any) -> None:
        given = dict(zip(self._names, args, strict=False)) | constants
        assert given["logits"].shape == (ROWS, WORDS) and given["width"] == WORDS
        self._bytes.moved(given["logits"])
        if given["KIND"] == "forward_kl":
            self._bytes.moved(given["teacher"])
        if "lses" in given:  # the second pass
            self._bytes.moved(given["logits"])


@pytest.fixture
def counted() -> Iterator[Callable[..., Bytes]]:
    """Return a function that counts a loss."""
    from megatron_rlspec.kernels import loss_passes, losses

    def count(work: Callable[[], None]) -> Bytes:
        counter = Bytes()
        passes = {name: Launches(counter, getattr(loss_passes, name)) for name in ("statistics", "gradient")}
        with (
            mock.patch.object(chosen, "losses", lambda *_: losses),
            mock.patch.multiple(loss_passes, **passes),
            counter,
        ):
            work()
        return counter

    return count


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(WORDS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return hidden, weight, torch.zeros(ROWS, dtype=torch.int64)


def drafter(kind: Any) -> Callable[[], None]:
    def work() -> None:
        hidden, weight, labels = inputs()
        student = Student(hidden, weight, labels, torch.ones(ROWS), kind, chunk=ROWS)
        if kind == "ce":
            student.learn_labels()
        else:
            student.learn_from(hidden.detach())
        student.finish()[0].backward()

    return work


def policy() -> None:
    hidden, weight, labels = inputs()
    logprobs, entropy = policy_logprobs(hidden, weight, labels, with_entropy=True, chunk=ROWS)
    (logprobs + entropy).sum().backward()


# How often the logits of a row are read or written. The product writes them, the first pass reads them, the second one
# reads and writes, and the product with the gradient reads it. A teacher's are written and read, and read again twice.
LOSSES = {"ce": 5, "forward_kl": 9}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_the_drafter(counted: Callable[..., Bytes], kind: str) -> None:
    """1.55 GB for cross-entropy and 2.8 GB for KL, where plain torch moves 12.4 and 29."""
    found = counted(drafter(kind))
    print(f"{kind}: {found.logits / 1e9:.2f} GB of logits")
    assert found.logits <= LOSSES[kind] * 2 * ROWS * WORDS
    assert found.weights == 0


def test_the_policy(counted: Callable[..., Bytes]) -> None:
    """2.2 GB for log-probs and entropy, forward and backward, where plain torch moves 28.9."""
    found = counted(policy)
    print(f"{found.logits / 1e9:.2f} GB of logits, {found.weights / 1e9:.2f} GB of the output layer's gradient")
    assert found.logits <= 7 * 2 * ROWS * WORDS
    # Once a chunk the product is written and added to the sum in float32, and once at the end the sum is cast.
    assert found.weights <= (2 + 2 + 4 + 4 + 4 + 2) * WORDS * HIDDEN


@pytest.mark.parametrize(("words", "bytes_", "chunk"), [(151_680, 2, 4352), (151_680, 4, 2048), (18_960, 2, 8192)])
def test_chunks_are_as_large_as_the_memory_for_their_logits(words: int, bytes_: int, chunk: int) -> None:
    weight = torch.empty(words, 8, dtype=torch.bfloat16 if bytes_ == 2 else torch.float32, device="meta")
    assert replace(VocabParallelHead.of(weight, 1.0, None), kernel=chosen).chunk == chunk
    assert VocabParallelHead.of(weight, 1.0, None).chunk < 1024


def test_a_loss_of_the_users_has_chunks_of_plain_torch() -> None:
    """It gets whole distributions in float32, of which memory holds several."""
    hidden, weight, labels = inputs()
    with mock.patch.object(chosen, "losses", return_value=chosen):
        chunks = [Student(hidden, weight, labels, torch.ones(ROWS), kind)._chunk for kind in ("ce", torch.sum)]
    assert chunks == [4352, VocabParallelHead.of(weight, 1.0, None).chunk]
