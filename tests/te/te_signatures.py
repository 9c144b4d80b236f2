"""Record what Transformer Engine's own sources say about the names that the stand-in has and megatron-core imports.

    python tests/te/te_signatures.py TRANSFORMER_ENGINE_CHECKOUT

reads the versions below from a clone of Transformer Engine and writes `te_signatures.json`: signatures, names of
parameters and whether there is an extra state, as facts; nothing is copied. Names that a version lacks are null. Of the
other versions the file has only the signatures that differ from the stand-in's version.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import contracts

VERSION = "2.11"  # the stand-in's; the newest that megatron-core 0.16.1 allows
VERSIONS = {
    "2.9": "v2.9",  # the oldest that it supports
    VERSION: "v2.11",
    "2.12": "v2.12",  # requirements/transformer-engine.txt
    "2.16.1": "v2.16.1",  # slime's
}
RECORD = Path(__file__).with_name("te_signatures.json")
STAND_IN = Path(__file__).with_name("stand_in")
PACKAGE = "transformer_engine"
LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm", "LayerNorm", "DotProductAttention")
METHODS = {
    "Linear": ("forward", "get_extra_state", "set_extra_state", "set_tensor_parallel_group"),
    "LayerNormLinear": ("forward", "get_extra_state", "set_extra_state", "set_tensor_parallel_group"),
    "GroupedLinear": ("forward", "get_extra_state", "set_extra_state", "init_fp8_metadata"),
    "RMSNorm": ("get_extra_state", "set_extra_state"),
    "LayerNorm": ("get_extra_state", "set_extra_state"),
    "DotProductAttention": ("forward", "get_extra_state", "set_context_parallel_group"),
}
OTHERS = (
    "common.recipe.DelayedScaling",
    "pytorch.attention.rope.apply_rotary_pos_emb",
    "pytorch.cpu_offload.get_cpu_offload_context",
    "pytorch.distributed.CudaRNGStatesTracker",
    "pytorch.distributed.activation_recompute_forward",
    "pytorch.distributed.checkpoint",
    "pytorch.distributed.get_all_rng_states",
    "pytorch.distributed.set_tensor_model_parallel_attributes",
    "pytorch.fp8.FP8GlobalStateManager.is_fp8_enabled",
    "pytorch.fp8.fp8_autocast",
    "pytorch.module.base.TransformerEngineBaseModule",
    "pytorch.module.base.get_dummy_wgrad",
    "pytorch.ops.FusibleOperation",
    "pytorch.ops.Sequential",
    "pytorch.optimizers.FusedAdam",
    "pytorch.optimizers.FusedAdam.step",
    "pytorch.optimizers.FusedSGD",
    "pytorch.optimizers.multi_tensor_applier",
    "pytorch.optimizers.multi_tensor_l2norm",
    "pytorch.optimizers.multi_tensor_scale",
    "pytorch.router.fused_compute_score_for_moe_aux_loss",
    "pytorch.router.fused_moe_aux_loss",
    "pytorch.router.fused_topk_with_score_function",
    "pytorch.tensor.QuantizedTensor",
)


def names() -> list[str]:
    """Return the dotted names whose signatures are recorded."""
    layers = [f"{PACKAGE}.pytorch.{layer}" for layer in LAYERS]
    methods = [f"{PACKAGE}.pytorch.{layer}.{method}" for layer in LAYERS for method in METHODS[layer]]
    return [*layers, *methods, *(f"{PACKAGE}.{name}" for name in OTHERS)]


def imports() -> list[str]:
    """Return every name that the installed megatron-core imports from Transformer Engine, in any file."""
    folder = contracts.locate("megatron.core").parent
    found = {dotted for source in folder.rglob("*.py") for dotted in _imports(ast.parse(source.read_text()))}
    return sorted(found)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def signatures(read: contracts.Read) -> dict[str, str | None]:
    """Map dotted names to signatures, as `show` writes them; "" for other objects, None for missing names."""
    return {name: _signature(name, read) for name in names()}


def _signature(name: str, read: contracts.Read) -> str | None:
    try:
        found = contracts.signature(name, read)
    except LookupError:
        return None
    return str(found).replace("Ellipsis", "...") if found else ""


def has(dotted: str, read: contracts.Read) -> bool:
    """Return whether a module, or a name in one, exists."""
    return read(dotted) is not None or _signature(dotted, read) is not None


def parameters(layer: str, read: contracts.Read) -> list[str]:
    """Return the names of the parameters that a layer's constructors register; `weight{i}` for numbered ones."""
    module, node = contracts._resolve(f"{PACKAGE}.pytorch", layer, read)
    found: set[str] = set()
    for _, owner in contracts._lineage(module, node, read):
        constructors = (f for f in owner.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
        found |= {name for constructor in constructors for name in _registered(constructor)}
    return sorted(found)


def _registered(constructor: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(constructor):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_parameter":
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield name.value
            elif isinstance(name, ast.JoinedStr):
                yield ast.unparse(name)[2:-1]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            target = ast.unparse(node.targets[0])
            if target in ("self.weight_names", "self.bias_names"):
                yield from (item.value for item in node.value.elts)


def _at(checkout: str, commit: str) -> contracts.Read:
    @cache
    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            shown = subprocess.run(["git", "-C", checkout, "show", f"{commit}:{file}"], capture_output=True, text=True)
            if shown.returncode == 0:
                return shown.stdout
        return None

    return read


def record(checkout: str) -> dict[str, Any]:
    """Return the facts of all versions. Raises AssertionError if layers have other parameters in another version."""
    of_version = {}
    for version, tag in VERSIONS.items():
        read = _at(checkout, tag)
        shown = subprocess.run(
            ["git", "-C", checkout, "rev-parse", f"{tag}^{{commit}}"], capture_output=True, text=True
        )
        of_version[version] = {
            "commit": shown.stdout.strip(),
            "signatures": signatures(read),
            "parameters": {layer: parameters(layer, read) for layer in LAYERS},
            "imports": {name: has(name, read) for name in imports()},
        }
    base = of_version[VERSION]
    out = {VERSION: base}
    for version, facts in of_version.items():
        if version == VERSION:
            continue
        assert facts["parameters"] == base["parameters"], version
        differing = {n: s for n, s in facts["signatures"].items() if s != base["signatures"][n]}
        out[version] = {"commit": facts["commit"], "signatures": differing}
    return out


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(sys.argv[1]), indent=1) + "\n")
