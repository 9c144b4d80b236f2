"""The names that `megatron_rlspec` gives, the examples of docs/api.md, and names that tests use: all exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import megatron_rlspec

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs/api.md").read_text(), re.DOTALL)


def test_every_public_name_can_be_imported():
    for name in megatron_rlspec.__all__:
        assert getattr(megatron_rlspec, name)


def test_a_drafter_learns_in_any_trainer():
    """The example's loss is the mean forward KL from the policy at the next position, where both are trained."""
    names = {}
    exec(EXAMPLES[1], names)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = torch.randint(32, (12,), generator=generator)
    mask = torch.tensor([0.0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1])
    hidden, embedding, head = random(12, 8), random(32, 8), random(32, 8)
    mix = random(16, 8).requires_grad_()

    def drafter(embedded, read):
        return torch.cat([embedded, read], 1) @ mix

    loss, sums = names["drafter_loss"](drafter, tokens, mask, torch.tensor([0, 5, 12]), hidden, embedding, head)
    loss.backward()
    rows = torch.tensor([1, 2, 6, 7, 8, 9])
    read = torch.cat([embedding[tokens[rows + 1]], hidden[rows]], 1)
    draft = (read @ mix @ head.T).log_softmax(1)
    policy = (hidden[rows + 1] @ head.T).log_softmax(1)
    expected = torch.nn.functional.kl_div(draft, policy, log_target=True, reduction="batchmean")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mix.grad, torch.autograd.grad(expected, mix)[0])
    assert sums["tokens"] == len(rows)


TESTS = Path(__file__).parent
OTHERS = ("slime", "sglang", "sgl_kernel", "torchvision", "ray", "megatron.training")  # absent, or need stand-ins


def imported(module: str, name: str) -> object:
    """Return what `from module import name` gives. Raises AttributeError if that is nothing."""
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{module}.{name}":
            raise AttributeError(f"{module} has no {name}") from None
        raise


def missing(tree: ast.AST) -> Iterator[str]:
    """Yield imports from our package that fail, and names that its modules do not have."""
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("megatron_rlspec"):
            continue
        for name in node.names:
            try:
                found = imported(node.module or "", name.name)
            except AttributeError as error:
                yield str(error)
            except ImportError as error:
                if not f"{error.name}.".startswith(tuple(f"{other}." for other in OTHERS)):
                    yield f"{node.module}.{name.name}: {error}"
            else:
                if isinstance(found, ModuleType):
                    modules[name.asname or name.name] = found
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    modules = {name: module for name, module in modules.items() if name not in bound}  # a local name may hide one
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if not hasattr(module, node.attr) and not isinstance(node.ctx, ast.Store):
                yield f"{module.__name__} has no {node.attr}"


def test_what_tests_use_of_the_package_is_there() -> None:
    found = {}
    for path in TESTS.rglob("*.py"):
        found[path.relative_to(TESTS).as_posix()] = list(missing(ast.parse(path.read_text())))
    assert {name: lacks for name, lacks in found.items() if lacks} == {}
