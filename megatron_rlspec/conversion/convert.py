"""Convert checkpoints between Hugging Face and Megatron, with the drafter, tensor by tensor.

Both directions, and the making of a new drafter, share one design: a source maps canonical Megatron names to full
tensors, which are written layer by layer. Memory holds one file of up to 5 GB on the way to Hugging Face, and one
tensor on the way to Megatron. The target appears when it is complete, or not at all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rlspec import files
from megatron_rlspec.conversion import gguf_file, run_checkpoint
from megatron_rlspec.conversion.drafter_files import build_drafter, words
from megatron_rlspec.conversion.torch_dist import (
    TRACKER,
    TorchDistReader,
    TorchDistWriter,
    checkpoint_directory,
    is_checkpoint,
)
from megatron_rlspec.models import hf_files as checkpoint
from megatron_rlspec.models.config import DRAFTER, STATED, refusal
from megatron_rlspec.models.directory import check_model, read_config
from megatron_rlspec.models.families import FAMILIES, names_where, record_of
from megatron_rlspec.models.hf_files import CheckpointError, read_hf, write_json
from megatron_rlspec.models.names import NameTable, name_table

Kind = Literal["hf", "megatron"]
_LAYER = re.compile(r"^((?:decoder|mtp|eagle_module\.decoder)\.layers\.\d+)\.")
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_FINAL_NORM = "decoder.final_layernorm.weight"


class HfSource(Mapping[str, Tensor]):
    """Maps canonical Megatron names to full tensors, fused from a Hugging Face checkpoint on access."""

    def __init__(self, family: NameTable, tensors: Mapping[str, Tensor]) -> None:
        self.family = family
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        row = self.family.row(name)
        return row.layout.fuse([self.tensors[hf] for hf in row.hf])

    def __iter__(self) -> Iterator[str]:
        return (
            name
            for name, row in self.family.rows.items()
            if all(hf in self.tensors for hf in row.hf)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WithFreshDrafter(Mapping[str, Tensor]):
    """Adds a new drafter to a source without one. It uses the target's first layer and final norm.

    The first layer was trained on embeddings, so the drafter starts as a one-layer language model of the next token.
    The half of the input projection that reads hidden states starts at zero and is learned. No random numbers are
    needed. A copy of the last layer would learn more slowly than a random one, because its input is from deep inside
    the target.

    The scales come from the model. The norms before the projection return vectors with the root mean square of the
    embeddings, which the first layer expects. The final norm is scaled down until the logits of a random direction have
    a standard deviation of 1. Unscaled, it fits the last layer's output, and the drafter would be certain of its
    mistakes.
    """

    def __init__(self, family: NameTable, source: Mapping[str, Tensor]) -> None:
        self.family = family
        self.source = source
        # The first layer of the drafter's own kind: with experts, or with full attention, if the drafter has them.
        wanted = _parts(family, "mtp.layers.0.transformer_layer.")
        kinds = (
            n
            for n in range(family.geometry.layers)
            if _parts(family, f"decoder.layers.{n}.") == wanted
        )
        self._template = next(kinds)

    def __getitem__(self, name: str) -> Tensor:
        if not name.startswith("mtp."):
            return self.source[name]
        inner = re.sub(r"^mtp\.layers\.\d+\.", "", name)
        if inner.startswith("transformer_layer."):
            block = inner.removeprefix("transformer_layer.")
            return self.source[f"decoder.layers.{self._template}.{block}"]
        norm = self.source[_FINAL_NORM]
        if inner == "final_layernorm.weight":
            return ((norm.double() + self._zero) * self._final_scale - self._zero).to(norm.dtype)
        if inner == "eh_proj.weight":
            eye = torch.eye(self.family.geometry.hidden, dtype=norm.dtype)
            # Megatron's order: embedding, hidden
            return torch.cat((eye, torch.zeros_like(eye)), dim=1)
        return torch.full_like(norm, self._embedding_rms - self._zero)

    def __iter__(self) -> Iterator[str]:
        return iter(self.family.rows)

    def __len__(self) -> int:
        return len(self.family.rows)

    @property
    def _zero(self) -> float:
        """Return what this family's norms add to their weight: 1 or 0."""
        return 1.0 if self.family.record.zero_centered_norms else 0.0

    @cached_property
    def _embedding_rms(self) -> float:
        return float(_mean_squares(self.source[_EMBEDDING]).mean().sqrt())

    @cached_property
    def _final_scale(self) -> float:
        head = self.source[_HEAD] if _HEAD in self.source else self.source[_EMBEDDING]
        gain = self.source[_FINAL_NORM].double() + self._zero
        deviation = float((_mean_squares(head) * gain.square()).sum().sqrt())
        return min(1.0, 1.0 / max(deviation, 1e-12))


def _mean_squares(rows: Tensor) -> Tensor:
    """Return the mean square of each column of `[V, H]`, float64 `[H]`, in parts to save memory."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for part in rows.split(4096):
        total += part.double().square().sum(0)
    return total / len(rows)


def _parts(family: NameTable, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in family.rows if name.startswith(prefix)}


def config_with_drafter(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model with one MTP layer. Qwen2 becomes MiMo, for which SGLang has a drafter.

    Llama becomes MiMo, too, with biases of 0. `model_type` stays: Transformers chooses the tokenizer's class by it, and
    another class splits texts in another way. Raises ValueError if no engine runs a drafter for this family.
    """
    record = record_of(config)
    name = record.added_drafter
    if not name:
        drafted = names_where(lambda facts: facts.added_drafter)
        known = refusal(config["architectures"][0], "given a drafter", drafted)
        raise ValueError(f"--add-mtp: {known}; --add-eagle3 gives it one where SGLang runs it")
    found = {**config, "architectures": [name], "num_nextn_predict_layers": 1}
    if FAMILIES[name].qkv_bias == "or_zero" and not record.has_qkv_bias(config):
        found["attention_bias"] = False
    return found


def config_without_drafter(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model without MTP layers. A MiMo that was a Qwen2 or Llama becomes that."""
    counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    config = {key: value for key, value in config.items() if key != STATED}
    architectures = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    before = architectures.get(config.get("model_type", ""))
    if config["architectures"] != ["MiMoForCausalLM"] or before is None:
        return {
            **config,
            "num_nextn_predict_layers": 0,
            **{key: 0 for key in counts if key in config},
        }
    found = {key: value for key, value in config.items() if key not in counts}
    return found | {"architectures": [before]}


@dataclass(frozen=True)
class SavedEagle3:
    """The EAGLE-3 drafter of a run's checkpoint, which is written to a directory of its own."""

    target: Path
    config: dict[str, Any]
    source: Path
    ids: Tensor


@dataclass(frozen=True)
class Conversion:
    """A planned conversion. `groups` are (label, canonical names): a layer, or a tensor outside of the layers."""

    source: Path
    target: Path
    to: Kind
    family: NameTable
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    small_files: Path
    fresh_drafter: bool
    # `small_files` of a GGUF source; removed with this object
    temporary: TemporaryDirectory[str] | None = None
    eagle3: SavedEagle3 | None = None


def plan(
    source: str | Path,
    target: str | Path,
    *,
    to: Kind | None = None,
    hf: str | Path | None = None,
    add_mtp: bool = False,
    drop_mtp: bool = False,
    spec: Literal["te", "local"] = "te",
    dtype: str = "",
) -> Conversion:
    """Read the source and plan the conversion. Raises CheckpointError, FileError or ValueError, each with one line.

    to        the kind of the target; default: the other kind than the source's, "hf" for a run's and with `drop_mtp`
    hf        Hugging Face directory with config.json and tokenizer of a Megatron checkpoint; default: the files that
              this converter left beside the checkpoint. Of a run's checkpoint: the model that the run started from
    drop_mtp  leave the drafter out
    spec      the layer specs that will read a Megatron checkpoint; they matter for the norms of latent attention only
    dtype     of the tensors of a GGUF source, default bfloat16; other sources keep theirs
    """
    source = Path(source)
    target = Path(target)
    kind, to = _kinds(source, to or ("hf" if drop_mtp else None), changed=add_mtp or drop_mtp)
    if dtype and kind != "gguf":
        raise ValueError(f"--dtype {dtype}: {source} is no GGUF file; its tensors keep their types")
    if kind == "run" and (add_mtp or to != "hf"):
        raise ValueError(f"{source} is a run's checkpoint: expected --to hf, without --add-mtp")
    files.check_new_directory(target)
    changed = add_mtp or drop_mtp
    temporary = drafter_directory = header = None
    if kind == "gguf":
        header = gguf_file.read_header(source)
        temporary = TemporaryDirectory(prefix="rlspec-gguf-")
        small_files = Path(temporary.name)
        gguf_file.write_small_files(source, header, small_files, dtype or "bfloat16")
    elif hf:
        small_files = Path(hf)
    elif kind == "run":
        small_files, drafter_directory = run_checkpoint.model_of(source)
    elif kind == "hf":
        small_files = source
    else:
        small_files = checkpoint_directory(source)
    if small_files.is_dir():
        record_of(read_config(small_files))
    config = check_model(small_files, "convert", weights=False, tokenizer=False)
    eagle3 = None
    if kind == "run":
        layout = run_checkpoint.layout_of(source)
        drafters = layout["drafter"] or drafter_directory
        if drafters or not _has_drafter("hf", small_files, name_table(config)):
            config["num_nextn_predict_layers"] = int(layout["drafter"] == "mtp")
        if layout["drafter"] == "mtp":
            config |= layout["chosen"]
        if layout["drafter"] == "eagle3" and not drop_mtp:
            eagle3 = _eagle3(source, target, drafter_directory)
        spec = run_checkpoint.spec_of(source)
    source_table = name_table(config, spec)
    if add_mtp and source_table.drafter_names and _has_drafter(kind, source, source_table):
        raise ValueError(f"{source}: has a drafter already; --add-mtp would replace it")
    if drop_mtp and not source_table.drafter_names and kind != "run":
        raise ValueError(f"{source}: has no drafter that --drop-mtp could leave out")
    described = config
    if add_mtp:
        config = config_with_drafter(config)
    elif drop_mtp:
        config = config_without_drafter(config)
    table = name_table(config, spec)
    tensors: Mapping[str, Tensor]
    if header is not None:
        dequantised = gguf_file.read_tensors(source, header, described, dtype or "bfloat16")
        tensors = HfSource(source_table, dequantised)
    elif kind == "hf":
        check_model(source, "convert", drafter=not changed, tokenizer=False)
        tensors = HfSource(source_table, read_hf(source)[1])
    else:
        read_as = source_table if drop_mtp else table
        untrained = kind == "run" and not run_checkpoint.layout_of(source)["drafter"]
        frozen = read_hf(small_files)[1] if untrained else {}
        tensors = _megatron_tensors(source, read_as, table, frozen, fresh_drafter=add_mtp)
    if add_mtp:
        tensors = WithFreshDrafter(table, tensors)
    groups = _groups(table)
    return Conversion(
        source, target, to, table, config, tensors, groups, small_files, add_mtp, temporary, eagle3
    )


def _megatron_tensors(
    source: Path,
    read_as: NameTable,
    family: NameTable,
    frozen: Mapping[str, Tensor],
    *,
    fresh_drafter: bool,
) -> run_checkpoint.RunTensors | TorchDistReader:
    """Open a Megatron checkpoint, or one of a run. Raises CheckpointError if tensors of `family` are missing.

    frozen         Hugging Face tensors that a run started from, if it trained no drafter: it wrote none
    fresh_drafter  the drafter's may be missing
    """
    tensors: run_checkpoint.RunTensors | TorchDistReader
    if run_checkpoint.is_run_checkpoint(source):
        tensors = run_checkpoint.RunTensors(
            source, read_as, run_checkpoint.layout_of(source)["tensor"]
        )
        if frozen:
            drafter = filter(read_as.is_drafter, read_as.rows)
            tensors.add(HfSource(read_as, frozen), drafter)
    else:
        tensors = TorchDistReader(source, read_as)
    lost = [name for name in family.rows if name not in set(tensors)]
    if fresh_drafter:
        lost = [name for name in lost if not family.is_drafter(name)]
    if lost:
        raise CheckpointError(
            f"{source}: lacks {len(lost)} tensors of {family.name}, such as {lost[0]}"
        )
    return tensors


def _kinds(
    source: Path, to: Kind | None, *, changed: bool
) -> tuple[Kind | Literal["gguf", "run"], Kind]:
    """Return the kinds of source and target. Raises CheckpointError or ValueError.

    changed  a drafter is added or left out, so source and target may be of one kind
    """
    if gguf_file.is_gguf(source):
        return "gguf", to or "hf"
    if not source.is_dir():
        what = "not a directory" if source.exists() else "no such directory"
        raise CheckpointError(
            f"{source}: {what}; expected a Hugging Face or a Megatron checkpoint, or a .gguf file"
        )
    if run_checkpoint.is_run_checkpoint(source):
        return "run", to or "hf"
    if (source / "checkpoints").is_dir():
        raise CheckpointError(
            f"{source} is a run's directory; expected its hf/, or one of its checkpoints/step-*"
        )
    if source.name == "checkpoints" and (steps := sorted(source.glob("step-*/"))):
        raise CheckpointError(
            f"{source} holds a run's checkpoints; expected one of them, such as {steps[-1]}"
        )
    kind: Kind = "hf" if is_hf(source) else "megatron"
    to = to or ("megatron" if kind == "hf" else "hf")
    if kind == to and not changed:
        raise ValueError(
            f"{source} is a {kind} checkpoint already; nothing to do (--add-mtp and --drop-mtp change it)"
        )
    return kind, to


def is_hf(path: Path) -> bool:
    """Return whether a directory is a Hugging Face checkpoint; a step of a converted one has config.json, too."""
    return (path / "config.json").exists() and not is_checkpoint(path)


def _eagle3(source: Path, target: Path, drafter: Path | None) -> SavedEagle3 | None:
    """Plan the directory of an EAGLE-3 drafter. Raises CheckpointError or FileError.

    drafter  the directory that the run's drafter started from
    """
    if drafter is None or not drafter.is_dir():
        raise CheckpointError(
            f"{source}: the run's drafter.path={drafter} is not here; expected it, or --drop-mtp"
        )
    config, tensors = read_hf(drafter)
    ids = words(tensors, config)
    run_checkpoint.check_words(source, ids)
    beside = target.with_name(f"{target.name}_drafter")
    files.check_new_directory(beside)
    return SavedEagle3(
        beside, {**config, **run_checkpoint.layout_of(source)["chosen"]}, drafter, ids
    )


def convert(work: Conversion, advance: Callable[[str], None] = lambda label: None) -> None:
    """Convert. Calls `advance(label)` after every group.

    Raises CheckpointError for a damaged source, OSError, for a full disk for example, and LockedError if another
    process writes this target. Nothing is then left behind.
    """
    lock = work.target.with_name(f".{work.target.name}.lock")
    with files.locked(lock):
        try:
            # another process may have finished it since it was planned
            files.check_new_directory(work.target)
            built = _build_hf(work, advance) if work.to == "hf" else _build_megatron(work, advance)
            if work.eagle3 is not None:
                drafter = _build_eagle3(work.eagle3, work)
                checkpoint.publish(drafter, work.eagle3.target)
            checkpoint.publish(built, work.target)
        finally:
            lock.unlink()


def _build_hf(work: Conversion, advance: Callable[[str], None]) -> Path:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        for label, names in work.groups:
            for name in names:
                for hf, tensor in work.family.to_hf(name, work.tensors[name]):
                    # A fresh drafter shares storage with a layer, which safetensors refuses.
                    yield hf, tensor.clone(memory_format=torch.contiguous_format)
                    for copy in work.family.rows[name].copies:
                        yield copy, tensor.clone()
            advance(label)

    return checkpoint.build_hf(
        work.target, work.config, tensors(), work.small_files, checkpoint.SHARD_BYTES
    )


def _build_megatron(work: Conversion, advance: Callable[[str], None]) -> Path:
    partial = work.target.with_name(f".{work.target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        writer = TorchDistWriter(partial / "release", work.family)
        for label, names in work.groups:
            writer.write((name, work.tensors[name]) for name in names)
            advance(label)
        writer.finish()
        write_json(partial / "release" / "config.json", work.config)
        checkpoint.copy_companions(work.small_files, partial / "release")
        (partial / TRACKER).write_text("release")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def _build_eagle3(drafter: SavedEagle3, work: Conversion) -> Path:
    described = {**work.config, DRAFTER: drafter.config}
    table = name_table(described)
    tensor = run_checkpoint.layout_of(work.source)["tensor"]
    held = run_checkpoint.RunTensors(work.source, table, tensor)
    own = (
        pair for name in held if table.is_drafter(name) for pair in table.to_hf(name, held[name])
    )
    return build_drafter(drafter.target, drafter.config, own, drafter.ids, drafter.source)


def _groups(family: NameTable) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Group the names: one group per layer, and one for each tensor outside of the layers."""
    groups: dict[str, list[str]] = {}
    for name in family.rows:
        found = _LAYER.match(name)
        groups.setdefault(found[1] if found else name, []).append(name)
    return tuple((label, tuple(names)) for label, names in groups.items())


def _has_drafter(kind: str, source: Path, family: NameTable) -> bool:
    if kind == "gguf":
        return False
    if kind == "hf":
        tensors = read_hf(source)[1]
        return any(name in tensors for name in family.drafter_names)
    return any(family.is_drafter(name) for name in TorchDistReader(source, family))
