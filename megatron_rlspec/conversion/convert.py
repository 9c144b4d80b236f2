"""Convert checkpoints between Hugging Face and Megatron, drafter included; a run's checkpoint to Hugging Face only.

`plan` reads the source's headers and returns a `Conversion`. It maps each canonical Megatron name to a full tensor that
is read or made on access, whatever the kind of the source; a fresh drafter is such a mapping, too. `convert` then reads
and writes one layer after the other. The target appears when it is complete, or not at all.

Memory: where the target is Hugging Face's, the tensors of one of its files, about 5 GB; where it is Megatron's, one
tensor. An EAGLE-3 drafter of a run is held whole.

`commands/convert.py` and `run/fresh.py` call both. Formats: `models/hf_files.py`, `torch_dist.py` (Megatron),
`run_checkpoint.py` (source only).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rlspec import files
from megatron_rlspec.conversion import run_checkpoint
from megatron_rlspec.conversion.drafter_files import build_drafter, words
from megatron_rlspec.conversion.torch_dist import (
    TRACKER,
    TorchDistReader,
    TorchDistWriter,
    checkpoint_directory,
    is_checkpoint,
)
from megatron_rlspec.models import hf_files as checkpoint
from megatron_rlspec.models.config import DRAFTER, refusal
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.families import FAMILIES, names_where, record_of
from megatron_rlspec.models.headers import Header
from megatron_rlspec.models.hf_files import CheckpointError, read_hf, write_json
from megatron_rlspec.models.lazy import Lazy, Makers, to_megatron
from megatron_rlspec.models.names import NameTable, name_table

Kind = Literal["hf", "megatron"]  # of a target; a source can also be a checkpoint of a run
# Group 1 is the prefix of a decoder layer or an MTP layer in a canonical name, of policy or drafter.
# `models.names.LAYER` finds the policy's only.
_LAYER = re.compile(r"^((?:decoder|mtp|eagle_module\.decoder)\.layers\.\d+)\.")
# canonical names
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class SavedEagle3:
    """The EAGLE-3 drafter of a run's checkpoint, which is written to a directory of its own.

    target   the new directory, beside that of the policy
    config   config.json of the drafter
    source   the directory that the run's drafter started from: its small files are copied
    ids      token ids that it drafts from, ascending, `[S] int64`
    family   names of policy and drafter
    tensors  full tensors of the drafter by canonical name, read on access
    """

    target: Path
    config: dict[str, Any]
    source: Path
    ids: Tensor
    family: NameTable
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Conversion:
    """A planned conversion. Nothing is written yet, and no tensor to convert is in memory.

    source       the checkpoint
    target       the new directory
    to           the kind of the target
    family       names of all tensors of the target, those of a fresh drafter included
    config       config.json of the target
    tensors      full tensors by canonical name, read or made on access
    small_files  the directory from which tokenizer and other small files are copied
    eagle3       the EAGLE-3 drafter of a run, a second directory to write; None: there is none
    """

    source: Path
    target: Path
    to: Kind
    family: NameTable
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    small_files: Path
    eagle3: SavedEagle3 | None = None

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Canonical names by label: a layer's prefix, or the name of a tensor outside of the layers.

        `convert` works and reports group by group, in this order.
        """
        groups: dict[str, list[str]] = {}
        for name in self.family.rows:
            layer = _LAYER.match(name)
            groups.setdefault(layer[1] if layer else name, []).append(name)
        return groups


def plan(
    source: str | Path,
    target: str | Path,
    *,
    to: Kind | None = None,
    hf: str | Path | None = None,
    add_mtp: bool = False,
    spec: Literal["te", "local"] = "te",
) -> Conversion:
    """Read the source and plan the conversion. Raises CheckpointError, FileError or ValueError, each with one line.

    source    directory of a checkpoint: of Hugging Face, of Megatron (torch_dist), or of a run (step-N)
    target    directory that does not exist yet
    to        the kind of the target; default: the other kind than the source's, "hf" for a run's
    hf        Hugging Face directory with config.json and tokenizer of a Megatron checkpoint; default: the files that
              this converter left beside the checkpoint. Of a run's checkpoint: the model that the run started from
    add_mtp   add a fresh MTP drafter; source and target may then be of one kind
    spec      the layer specs that will read a Megatron checkpoint; they matter for the norms of latent attention only
    """
    source = Path(source)
    target = Path(target)
    kind, to = _kinds(source, to, add_mtp=add_mtp)
    if kind == "run" and (add_mtp or to != "hf"):
        raise ValueError(f"{source} is a run's checkpoint: expected --to hf, without --add-mtp")
    files.check_new_directory(target)
    if kind == "run":
        return _plan_of_run(source, target, Path(hf) if hf else None)
    small_files = source if kind == "hf" else checkpoint_directory(source)
    if hf:
        small_files = Path(hf)
    source_config = check_model(small_files, "convert", weights=False, tokenizer=False)
    source_table = name_table(source_config, spec)
    if add_mtp and source_table.drafter_names and _has_drafter(kind, source, source_table):
        raise ValueError(f"{source}: has a drafter already; --add-mtp would replace it")
    config = config_with_drafter(source_config) if add_mtp else source_config
    table = name_table(config, spec)
    tensors: Mapping[str, Tensor]
    if kind == "hf":
        # The check above left the weights out, because `small_files` may hold none. `source` does.
        check_model(source, "convert", drafter=not add_mtp, tokenizer=False)
        tensors = to_megatron(source_table, read_hf(source)[1])
    else:
        # `table` also names a drafter to add. The reader leaves out names that the source lacks, so one table serves
        # sources with and without a drafter.
        tensors = TorchDistReader(source, table)
        _check_complete(source, tensors, table, drafter=not add_mtp)
    if add_mtp:
        tensors = with_fresh_drafter(table, tensors)
    return Conversion(source, target, to, table, config, tensors, small_files)


def _plan_of_run(source: Path, target: Path, hf: Path | None) -> Conversion:
    """Plan the conversion of a run's checkpoint to Hugging Face. Raises CheckpointError or FileError.

    source  the directory of the checkpoint, RUN/checkpoints/step-N
    hf      the model that the run started from; None: where the run's config.json says
    """
    model, drafter_path = run_checkpoint.model_of(source, hf)
    config = check_model(model, "convert", weights=False, tokenizer=False)
    layout = run_checkpoint.layout_of(source)
    # A run that trained no drafter, and had none in `drafter.path`, drafted with the model's own MTP layers, which then
    # belong to the result.
    keeps_own_drafter = not layout.drafter and drafter_path is None
    if not keeps_own_drafter or not _has_drafter("hf", model, name_table(config)):
        # one MTP layer if the checkpoint has a trained one, otherwise none
        config = {**config, "num_nextn_predict_layers": int(layout.drafter == "mtp")}
    if layout.drafter == "mtp":
        config = {**config, **layout.chosen}
    table = name_table(config, run_checkpoint.spec_of(source))
    tensors = run_checkpoint.tensors_of(source, table, layout.tensor)
    if not layout.drafter:
        # A checkpoint has no tensors of a drafter that was not trained. Its MTP layers come from the model; if `table`
        # has none, this adds nothing.
        frozen = to_megatron(table, read_hf(model)[1])
        for name in filter(table.is_drafter, frozen):
            tensors.makers[name] = frozen.makers[name]
    _check_complete(source, tensors, table)
    eagle3 = None
    if layout.drafter == "eagle3":
        eagle3 = _plan_of_eagle3(source, target, config, layout, drafter_path)
    return Conversion(source, target, "hf", table, config, tensors, model, eagle3)


def _check_complete(
    source: Path, tensors: Mapping[str, Tensor], table: NameTable, *, drafter: bool = True
) -> None:
    """Raise CheckpointError if `tensors` lacks names of `table`. `drafter`: names of the drafter must be there, too."""
    missing = sorted(table.rows.keys() - set(tensors))
    if not drafter:
        missing = [name for name in missing if not table.is_drafter(name)]
    if missing:
        raise CheckpointError(
            f"{source}: lacks {len(missing)} tensors of {table.name}, such as {missing[0]}"
        )


def _kinds(source: Path, to: Kind | None, *, add_mtp: bool) -> tuple[Kind | Literal["run"], Kind]:
    """Return the kinds of source and target. Raises CheckpointError or ValueError.

    add_mtp  source and target may then be of one kind
    """
    if not source.is_dir():
        wrong = "not a directory" if source.exists() else "no such directory"
        if source.suffix == ".gguf":
            wrong += " (tools/gguf_to_hf.py makes a Hugging Face directory of a GGUF file)"
        raise CheckpointError(
            f"{source}: {wrong}; expected a Hugging Face or a Megatron checkpoint"
        )
    if run_checkpoint.is_run_checkpoint(source):
        return "run", to or "hf"  # `plan` refuses another target than "hf"
    if steps := sorted(source.glob("step-*/layout.json")):
        raise CheckpointError(
            f"{source} holds a run's checkpoints; expected one of them, such as {steps[-1].parent}"
        )
    if (source / "checkpoints").is_dir():
        raise CheckpointError(
            f"{source} is a run's directory; expected its hf/, or one of its checkpoints/step-*"
        )
    # a Megatron checkpoint of this converter has a config.json, too
    is_hf = (source / "config.json").exists() and not is_checkpoint(source)
    kind: Kind = "hf" if is_hf else "megatron"
    to = to or ("megatron" if kind == "hf" else "hf")
    if kind == to and not add_mtp:
        raise ValueError(
            f"{source} is a {kind} checkpoint already; nothing to do (--add-mtp changes it)"
        )
    return kind, to


def _plan_of_eagle3(
    source: Path,
    target: Path,
    config: dict[str, Any],
    layout: run_checkpoint.Layout,
    drafter: Path | None,
) -> SavedEagle3:
    """Plan the directory of an EAGLE-3 drafter. Raises CheckpointError or FileError.

    target   the directory of the policy; the drafter's has the same name with `_drafter` behind it
    config   config.json of the policy
    drafter  the directory that the run's drafter started from: it has the draft vocabulary, the checkpoint has not.
             None, or a directory that is not there, is refused
    """
    if drafter is None or not drafter.is_dir():
        raise CheckpointError(
            f"{source}: its drafter's words are in drafter.path={drafter} of the run, which is not here; expected it"
        )
    drafter_config, drafter_tensors = read_hf(drafter)
    ids = words(drafter_tensors, drafter_config)
    # `eagle3_identity` in `train/model.py` wrote the checksum into the checkpoint's layout: over the ids as int64. The
    # directory may have changed since the run.
    if f"{zlib.crc32(ids.numpy().tobytes()):08x}" not in layout.words:
        raise CheckpointError(
            f"{source}: its drafter drafts from other words than the run's drafter.path={drafter} has now"
        )
    beside = target.with_name(f"{target.name}_drafter")
    files.check_new_directory(beside)
    drafter_config |= layout.chosen
    table = name_table({**config, DRAFTER: drafter_config})
    tensors = run_checkpoint.tensors_of(source, table, layout.tensor)
    return SavedEagle3(beside, drafter_config, drafter, ids, table, tensors)


def convert(
    work: Conversion, advance: Callable[[str], None] = lambda label: None, *, link: bool = False
) -> None:
    """Write the target of a planned conversion. Calls `advance(label)` after every group of `Conversion.groups`.

    link  only for a conversion from Hugging Face to Hugging Face, with `add_mtp` (`run/fresh.py`): the target has
          symbolic links to the source's files, and only tensors that are not in them are written. The source must
          then stay where it is

    Raises CheckpointError for a damaged source, OSError (for a full disk, for example), and FileError if another
    process writes this target or has written it. This call has then made no target, but perhaps the directory of an
    EAGLE-3 drafter.
    """
    lock = work.target.with_name(f".{work.target.name}.lock")
    with files.locked(lock):
        try:
            # another process may have finished it since it was planned
            files.check_new_directory(work.target)
            if work.to == "hf":
                built = _build_hf(work, advance, _linkable(work.source) if link else {})
            else:
                built = _build_megatron(work, advance)
            # The drafter is published first. So a target that exists always has its drafter beside it.
            if work.eagle3 is not None:
                drafter = _build_eagle3(work.eagle3)
                checkpoint.publish(drafter, work.eagle3.target)
            checkpoint.publish(built, work.target)
        finally:
            # Before the lock is freed: a process that opened this file meanwhile makes a new one (`files.locked`).
            lock.unlink()


def _build_hf(
    work: Conversion, advance: Callable[[str], None], linked: Mapping[str, Header]
) -> Path:
    """Write a Hugging Face directory for `publish`, and return it.

    linked  tensors, by Hugging Face name, that stay in the source's files, to which the directory gets links; {}: none
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for label, names in work.groups.items():
            for name in names:
                row = work.family.rows[name]
                if linked.keys() >= set(row.hf):
                    continue  # before the tensor is read
                for hf, tensor in work.family.to_hf(name, work.tensors[name]):
                    if hf in linked:
                        continue
                    # A copy, because safetensors refuses tensors that share storage: those of a fresh drafter's layer
                    # can be the same as the policy's.
                    yield hf, tensor.clone(memory_format=torch.contiguous_format)
                    for copy in row.copies:
                        yield copy, tensor.clone()
            advance(label)

    return checkpoint.build_hf(
        work.target, work.config, tensors(), work.small_files, checkpoint.SHARD_BYTES, linked
    )


def _linkable(source: Path) -> dict[str, Header]:
    """Return the tensors of a Hugging Face directory for which the target needs no more than a link to the file.

    Tensors whose name in the file is not the name that the target must have are left out: a tied embedding that is
    stored under the head's name, and experts that are stored in one tensor.
    """
    headers = read_hf(source)[1].headers
    return {name: header for name, header in headers.items() if header.name == name}


def _build_megatron(work: Conversion, advance: Callable[[str], None]) -> Path:
    """Write a Megatron checkpoint for `publish`, and return it.

    config.json and tokenizer are written into it: a later conversion back to Hugging Face reads them from there.
    """
    with checkpoint.building(work.target) as folder:
        release = folder / "release"
        writer = TorchDistWriter(release, work.family)
        for label, names in work.groups.items():
            # a generator: one tensor at a time is in memory
            writer.write((name, work.tensors[name]) for name in names)
            advance(label)
        writer.finish()
        write_json(release / "config.json", work.config)
        checkpoint.copy_companions(work.small_files, release)
        (folder / TRACKER).write_text("release")
    return folder


def _build_eagle3(drafter: SavedEagle3) -> Path:
    """Write the directory of an EAGLE-3 drafter for `publish`, and return it. All its tensors are in memory at once."""
    table = drafter.family
    tensors: list[tuple[str, Tensor]] = []
    for name in filter(table.is_drafter, drafter.tensors):
        tensors += table.to_hf(name, drafter.tensors[name])
    return build_drafter(drafter.target, drafter.config, tensors, drafter.ids, drafter.source)


def _has_drafter(kind: str, source: Path, family: NameTable) -> bool:
    """Return whether a checkpoint holds a tensor of the drafter that `family` names. `kind`: "hf" or "megatron"."""
    if kind == "hf":
        tensors = read_hf(source)[1]
        return any(name in tensors for name in family.drafter_names)
    return any(family.is_drafter(name) for name in TorchDistReader(source, family))


# ---- a fresh drafter ---------------------------------------------------------------------------------------------


def with_fresh_drafter(table: NameTable, source: Mapping[str, Tensor]) -> Lazy:
    """Add a new MTP drafter to a source without one. It starts with the target's first layer and final norm.

    table   names of the model with the drafter
    source  full tensors of the target by canonical name

    Tensors of the drafter's decoder layer are the target's own, not copies: a writer must copy them. The target needs a
    layer with the same tensors as the drafter's layer, else StopIteration is raised: a drafter with experts needs a
    target in which a layer has experts.

    The first layer was trained on embeddings, so the drafter starts as a one-layer language model of the next token.
    The half of the input projection that reads hidden states starts at zero and is learned. No random numbers are
    needed. A copy of the last layer would learn more slowly than a random one, because its input is from deep inside
    the target.

    The scales come from the model. The norms before the projection return vectors with the root mean square of the
    embeddings, which the first layer expects. The final norm is scaled down until the logits of a random direction have
    a standard deviation of 1. Unscaled, it fits the last layer's output, and the drafter would be certain of its
    mistakes.
    """
    # The number of the first layer with the same tensors as the drafter's. In a model whose first layers are dense, and
    # whose drafter has experts, it is the first layer with experts.
    drafter_parts = _parts(table, "mtp.layers.0.transformer_layer.")
    layers = range(table.geometry.layers)
    layer = next(n for n in layers if _parts(table, f"decoder.layers.{n}.") == drafter_parts)

    @cache  # two norms need it, and it takes a pass over the whole embedding
    def embedding_rms() -> float:
        return float(_mean_squares(source[_EMBEDDING]).mean().sqrt())

    # returns the drafter's tensor with this canonical name
    def make(name: str) -> Tensor:
        inner = re.sub(r"^mtp\.layers\.\d+\.", "", name)
        if inner.startswith("transformer_layer."):
            block = inner.removeprefix("transformer_layer.")
            return source[f"decoder.layers.{layer}.{block}"]
        norm = source[_FINAL_NORM]
        if inner == "final_layernorm.weight":
            head = source[_HEAD if _HEAD in source else _EMBEDDING]
            # Standard deviation, over the vocabulary, of the logits of a normed vector with independent channels. The
            # norm is scaled down only: `min`. 1e-12 avoids a division by zero for a head of zeros.
            gain = norm.double()
            deviation = float((_mean_squares(head) * gain.square()).sum().sqrt())
            scale = min(1.0, 1.0 / max(deviation, 1e-12))
            return (gain * scale).to(norm.dtype)
        if inner == "eh_proj.weight":
            eye = torch.eye(table.geometry.hidden, dtype=norm.dtype)
            # Megatron's order: embedding, hidden
            return torch.cat((eye, torch.zeros_like(eye)), dim=1)
        return torch.full_like(norm, embedding_rms())  # enorm and hnorm

    makers: Makers = {}
    for name in table.rows:
        makers[name] = partial(make if name.startswith("mtp.") else source.__getitem__, name)
    return Lazy(makers)


def _mean_squares(rows: Tensor) -> Tensor:
    """Return the mean square of each column of `[V, H]`, float64 `[H]`.

    float64, because a sum of V squares would lose digits in the model's type; in parts, because a float64 copy of the
    whole table would be several times as large.
    """
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for part in rows.split(4096):
        total += part.double().square().sum(0)
    return total / len(rows)


def _parts(family: NameTable, prefix: str) -> set[str]:
    """Return what follows `prefix` in the canonical names that begin with it."""
    return {name.removeprefix(prefix) for name in family.rows if name.startswith(prefix)}


def config_with_drafter(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model with one MTP layer, a new dictionary.

    The architecture becomes `Family.added_drafter`: Qwen2 becomes MiMo, for which SGLang has a drafter, and so does
    Llama, with biases of 0. `model_type` stays: Transformers chooses the tokenizer's class by it, and another class
    splits texts in another way. Raises ValueError if no engine runs a drafter for this family.
    """
    record = record_of(config)
    name = record.added_drafter
    if not name:
        drafted = names_where(lambda facts: facts.added_drafter)
        known = refusal(config["architectures"][0], "given a drafter", drafted)
        raise ValueError(f"--add-mtp: {known}; --add-eagle3 gives it one where SGLang runs it")
    changed = {**config, "architectures": [name], "num_nextn_predict_layers": 1}
    # a Llama that becomes a MiMo: `Family.has_qkv_bias` reads this key
    if FAMILIES[name].qkv_bias == "or_zero" and not record.has_qkv_bias(config):
        changed["attention_bias"] = False
    return changed
