"""Names and parameters of slime that this package uses, and a check that a source tree has them.

Signatures are read from the source without importing it, so that several versions can be compared.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

Read = Callable[[str], str | None]  # dotted module name -> its source; None where there is no such module

# What the hooks of integrations/slime replace and call.
_SLIMES_UPDATES = "slime.backends.megatron_utils.update_weight.update_weight"
SLIME: dict[str, tuple[str, ...]] = {
    "slime.backends.megatron_utils.data.get_batch": ("data_iterator", "keys", "pad_multiplier", "allgather_cp"),
    "slime.backends.megatron_utils.model.train_one_step": ("args", "rollout_id", "step_id", "model", "optimizer"),
    "slime.backends.megatron_utils.model.setup_model_and_optimizer": ("args", "role"),
    "slime.backends.megatron_utils.model.get_megatron_optimizer": (),
    "slime.backends.megatron_utils.model.load_checkpoint": (),
    "slime.backends.megatron_utils.model_provider.get_model_provider_func": ("args", "role"),
    "slime.utils.types.Sample.SpecInfo.add": ("meta_info",),
    "slime.observability.logging_utils.log": ("args",),
    "slime.observability.metric_utils.compute_rollout_step": ("args", "rollout_id"),
    f"{_SLIMES_UPDATES}_from_tensor.UpdateWeightFromTensor.update_weights": (),
    f"{_SLIMES_UPDATES}_from_tensor.UpdateWeightFromTensor._send_hf_params": ("hf_named_tensors",),
    f"{_SLIMES_UPDATES}_from_distributed.UpdateWeightFromDistributed.update_weights": (),
    f"{_SLIMES_UPDATES}_from_distributed.UpdateWeightFromDistributed._on_chunk": ("hf_chunk",),
    f"{_SLIMES_UPDATES}_from_disk.UpdateWeightFromDisk.update_weights": (),
    f"{_SLIMES_UPDATES}_from_disk_delta.UpdateWeightFromDiskDelta._iter_hf_tensors": (),
    f"{_SLIMES_UPDATES.rpartition('.')[0]}.hf_weight_iterator_direct.HfWeightIteratorDirect.get_hf_weight_chunks": (),
}


SHOWN = 8  # names that one line lists
_parse = cache(ast.parse)


def broken(contract: Mapping[str, Sequence[str]], read: Read | None = None) -> str | None:
    """Return one line with the missing names and parameters of a contract; None if none is missing."""
    missing = lacking(contract, read)
    if not missing:
        return None
    rest = f"; and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return f"not found: {'; '.join(missing[:SHOWN])}{rest}"


def lacking(contract: Mapping[str, Sequence[str]], read: Read | None = None) -> list[str]:
    """List the missing names and parameters of a contract, as `broken` joins them."""
    read = read or installed()
    missing = []
    for dotted, parameters in contract.items():
        try:
            found = signature(dotted, read)
        except LookupError as error:
            missing.append(f"{dotted} ({error.args[0]})")
            continue
        if parameters and (gone := sorted(set(parameters) - set(found.parameters if found else ()))):
            missing.append(f"{dotted}({', '.join(gone)})")
    return missing


def installed(path: Sequence[str] = ()) -> Read:
    """Return a reader of modules, which looks in the directories of `path` first, then where Python would."""

    @cache
    def read(module: str) -> str | None:
        file = locate(module, path)
        return file.read_text(encoding="utf-8") if file else None

    return read


def locate(module: str, path: Sequence[str] = ()) -> Path | None:
    """Find the file of a module: in the directories of `path`, else where Python would."""
    return next((f for folder in path if (f := _file(Path(folder), module.split(".")))), None) or _find(module)


def signature(dotted: str, read: Read) -> inspect.Signature | None:
    """Read the signature of a function, method (without self) or class, given its dotted name; None for other objects.

    Defaults are shown as `...`; annotations are left out. Raises LookupError, which names the missing part.
    """
    parts = dotted.split(".")
    cut = next((n for n in range(len(parts) - 1, 0, -1) if read(".".join(parts[:n])) is not None), 0)
    if not cut:
        raise LookupError(f"no module {parts[0]}")
    module, node = _resolve(".".join(parts[:cut]), parts[cut], read)
    for name in parts[cut + 1 :]:
        if not isinstance(node, ast.ClassDef):
            raise LookupError(f"{name} of something that is no class")
        module, node = _member(module, node, name, read)
    if isinstance(node, ast.ClassDef):
        return _constructor(module, node, read)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        return _signature(node.args, skip=int(len(parts) - cut > 1 and not static))
    return None


def _find(module: str) -> Path | None:
    """Find the file of a module without importing (`find_spec` of a dotted name imports the parents)."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    roots = map(Path, spec.submodule_search_locations or ())
    return next((file for root in roots if (file := _file(root, rest))), None)


def _file(root: Path, parts: Sequence[str]) -> Path | None:
    place = root.joinpath(*parts)
    return next((f for f in (place.with_name(f"{place.name}.py"), place / "__init__.py") if f.is_file()), None)


def _resolve(module: str, name: str, read: Read) -> tuple[str, ast.AST]:
    """Return the module that defines a name, re-exports followed, and the name's last definition in it."""
    statements = list(_statements(_parse(read(module) or "").body))
    found = [node for node in statements if name in _bound(node)]
    if not found:
        for node in statements:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                try:
                    return _resolve(_origin(module, node, read), name, read)
                except LookupError:
                    continue
        raise LookupError(f"no {name} in {module}")
    for node in reversed(found):
        if not isinstance(node, ast.ImportFrom):
            return module, node
        origin = _origin(module, node, read)
        if read(origin) is not None:
            return _resolve(origin, next(a.name for a in node.names if (a.asname or a.name) == name), read)
    return module, found[-1]  # imported from outside what can be read


def _origin(module: str, node: ast.ImportFrom, read: Read) -> str:
    """Return the absolute name of the module that an import reads."""
    if not node.level:
        return node.module or ""
    above = node.level - (read(f"{module}.__init__") is not None)  # a package's own directory is its first level
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - above], *filter(None, [node.module])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those under `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.orelse, *node.body])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _statements([*handlers, *node.orelse, *node.body])
        else:
            yield node


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _lineage(module: str, node: ast.ClassDef, read: Read) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its bases, nearest first, as far as their source can be read."""
    yield module, node
    for base in node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            try:
                place, found = _resolve(module, base.id, read)
            except LookupError:
                continue  # a builtin
            if isinstance(found, ast.ClassDef):
                yield from _lineage(place, found, read)


def _member(module: str, node: ast.ClassDef, name: str, read: Read) -> tuple[str, ast.AST]:
    for place, owner in _lineage(module, node, read):
        for statement in _statements(owner.body):
            if name in _bound(statement):
                return place, statement
    for place, owner in _lineage(module, node, read):
        for inner in ast.walk(owner):
            if isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store):
                return place, inner  # set by a method
    raise LookupError(f"no {name} in {node.name}")


def _constructor(module: str, node: ast.ClassDef, read: Read) -> inspect.Signature:
    """Return the signature of the nearest `__init__`, or of the annotated fields where a dataclass is nearer."""
    fields: dict[str, inspect.Parameter] = {}
    annotated: dict[str, inspect.Parameter] = {}
    plain = False  # whether the latest __init__ is written out, not made by a dataclass
    for _, owner in reversed(list(_lineage(module, node, read))):
        init = [s for s in _statements(owner.body) if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
        decorated = any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list)
        plain = bool(init) or (plain and not decorated)
        if init:
            fields = dict(_signature(init[-1].args, skip=1).parameters)
        elif not plain:
            for s in _statements(owner.body):
                if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name):
                    annotated[s.target.id] = _parameter(s.target.id, s.value is not None)
            fields = dict(annotated)
    return inspect.Signature(sorted(fields.values(), key=lambda p: (p.kind, p.default is ...)))


def _signature(given: ast.arguments, skip: int) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    with_default = len(positional) - len(given.defaults)
    out = []
    for i, argument in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if i < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        out.append(_parameter(argument.arg, i >= with_default, kind))
    out = out[skip:]
    if given.vararg:
        out.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        out.append(_parameter(argument.arg, default is not None, kinds.KEYWORD_ONLY))
    if given.kwarg:
        out.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(out)


def _parameter(
    name: str, has_default: bool, kind: inspect._ParameterKind = inspect.Parameter.POSITIONAL_OR_KEYWORD
) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=... if has_default else inspect.Parameter.empty)
