"""Signatures read from source equal those of `inspect`, through re-exports, bases and dataclasses."""

import inspect
import os
import pkgutil

import contracts
import pytest
from sglang_names import CONTRACTS

MODULES = {
    "top": "",
    "top.__init__": "",
    "top.a": """
import dataclasses
from .b import original as renamed
from top.b import Base
try:
    from nowhere import maybe
except ImportError:
    def maybe(x): ...
class Child(Base):
    def method(self, x, *, y=1): ...
    @staticmethod
    def free(z): ...
@dataclasses.dataclass
class Data:
    first: int
    second: int = 2
@dataclasses.dataclass
class More(Data):
    third: int = 3
constant = 1
""",
    "top.c": """
from top.b import *
@dataclasses.dataclass
class Over(Base):
    own: int
class Holder:
    def __init__(self):
        self.held = 1
""",
    "top.b": """
def original(a, /, b, *rest, c, d=None, **others): ...
class Base:
    def __init__(self, config, size=1): ...
    def inherited(self, q): ...
""",
}


def read(dotted: str) -> str:
    return str(contracts.signature(dotted, MODULES.get)).replace("Ellipsis", "...")


def test_signatures():
    assert read("top.a.renamed") == "(a, /, b, *rest, c, d=..., **others)"
    assert read("top.a.maybe") == "(x)"
    assert read("top.a.Child") == "(config, size=...)"
    assert read("top.a.Child.method") == "(x, *, y=...)"
    assert read("top.a.Child.free") == "(z)"
    assert read("top.a.Child.inherited") == "(q)"
    assert read("top.a.More") == "(first, second=..., third=...)"
    assert read("top.a.constant") == "None"
    assert read("top.c.Base") == "(config, size=...)"
    assert read("top.c.Over") == "(own)"
    assert read("top.c.Holder.held") == "None"


@pytest.mark.parametrize(
    ("dotted", "part"),
    [
        ("top.a.nothing", "no nothing in top.a"),
        ("top.a.Child.nothing", "no nothing in Child"),
        ("top.c.nothing", "no nothing in top.c"),
        ("top.d.nothing", "no d in top"),
        ("nowhere.f", "no module nowhere"),
    ],
)
def test_missing_names_are_listed(dotted, part):
    with pytest.raises(LookupError, match=part):
        contracts.signature(dotted, MODULES.get)


def test_broken_lists_missing_names():
    whole = {"top.a.renamed": ("b", "c"), "top.a.constant": ()}
    assert contracts.broken(whole, MODULES.get) is None
    broken = contracts.broken(whole | {"top.a.maybe": ("y",), "top.a.gone": ()}, MODULES.get)
    assert broken == "not found: top.a.maybe(y); top.a.gone (no gone in top.a)"


def test_what_is_installed_keeps_its_contract():
    assert contracts.broken(CONTRACTS["0.5.23"]) is None


@pytest.mark.slime
@pytest.mark.skipif(not os.environ.get("RLSPEC_SLIME"), reason="set RLSPEC_SLIME to a checkout of slime")
def test_slime_keeps_its_contract():
    assert contracts.broken(contracts.SLIME, contracts.installed([os.environ["RLSPEC_SLIME"]])) is None


@pytest.mark.parametrize(
    "dotted",
    [
        "megatron.core.models.gpt.gpt_model.GPTModel",
        "megatron.core.transformer.attention.SelfAttentionSubmodules",
        "megatron.core.optimizer._get_megatron_optimizer_based_on_param_groups",
        "megatron.core.optimizer.optimizer.MegatronOptimizer.get_grad_norm",
    ],
)
def test_reading_sees_what_importing_sees(dotted):
    found = inspect.signature(pkgutil.resolve_name(dotted)).parameters
    wanted = [(p.name, p.kind, p.default is p.empty) for p in found.values() if p.name != "self"]
    ours = contracts.signature(dotted, contracts.installed()).parameters
    assert [(p.name, p.kind, p.default is p.empty) for p in ours.values()] == wanted
