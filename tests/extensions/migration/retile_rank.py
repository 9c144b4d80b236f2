"""What one rank of the tests of tensor-parallel switches does."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import embedded_oracle as oracle
import numpy as np
import torch
import torch.distributed as dist

from megatron_rlspec.extensions.migration.embedded import retile
from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder
from megatron_rlspec.rollout.embedded.parallel import Solo

PATH = (1, 2, 4, 1, 4, 2, 1)  # tensor-parallel sizes, one after the other


WORDS = torch.tensor([1, 2, 3, 5, 8, 13, 40, 47])


def of_kind(kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config.json and tensors of a model with an MTP layer, or with an EAGLE-3 drafter beside it."""
    config, tensors = oracle.tiny(vocab=48, heads=8, kv_heads=4, hidden=32, tied=kind == "tied", seed=9)
    if kind != "eagle3":
        return config, tensors
    own = config | {"intermediate_size": 40, "draft_vocab_size": len(WORDS), "num_hidden_layers": 1}
    own |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "attention_bias": False}
    own |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0]}}
    config |= {"num_nextn_predict_layers": 0, "eagle3": own}
    model = Decoder(Architecture.from_hf(config), torch.float64, "cpu", Solo(), 8)
    generator = torch.Generator().manual_seed(5)
    for name in sorted(model.tensors.keys() - tensors.keys()):  # one order in all processes
        drawn = torch.randn(model.full_shape(name), generator=generator, dtype=torch.float64) * 0.3
        tensors[name] = drawn + 1 if drawn.ndim == 1 else drawn
    return config, {name: tensors[name] for name in model.tensors}


def model_at(groups: Groups, tp: int, kind: str = "untied") -> Decoder:
    """A decoder whose weights were loaded at this size."""
    config, tensors = of_kind(kind)
    model = Decoder(Architecture.from_hf(config), torch.float32, "cpu", groups.of(tp), 64)
    for name, tensor in tensors.items():
        if not (kind == "tied" and name == "lm_head.weight"):
            model.write(name, tensor)
    if kind != "eagle3":
        model.set_draft_vocabulary(WORDS)
    return model


def contents(meeting: str, slots: int, kind: str) -> list[str]:
    """What is wrong in weights and caches after switches along PATH."""
    oracle.meet(meeting)
    groups = Groups()
    return weights(groups, kind) + caches(groups, slots, kind)


def weights(groups: Groups, kind: str) -> list[str]:
    """Names of tensors that differ, after each switch along PATH, from a model that was loaded at that size."""
    model = model_at(groups, 1, kind)
    _forward(model, torch.arange(5))
    different = []
    for old, new in zip(PATH, PATH[1:], strict=False):
        retile.retile_weights(model, retile.Switch(groups, old, new))
        loaded = model_at(groups, new, kind)
        for name, shard in model.tensors.items():
            if not torch.equal(shard.view, loaded.tensors[name].view):
                different.append(f"{old} to {new}: {name}")
        for name in ("head", "draft_head", "draft_ids"):
            if getattr(model, name) is not None and not torch.equal(getattr(model, name), getattr(loaded, name)):
                different.append(f"{old} to {new}: {name}")
        tokens = torch.arange(5)
        if not torch.equal(_forward(model, tokens), _forward(loaded, tokens)):
            different.append(f"{old} to {new}: the forward")
    return different


def _forward(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt."""
    cache = Cache(model, 1, 64, 64)
    row = cache.open(tokens.numpy(), len(tokens))
    cache.ensure_slots(row, len(tokens))
    columns = torch.arange(len(tokens))[None]
    plan = cache.plan(torch.from_numpy(cache.slots[[row], : len(tokens)]), columns)
    return model.logits(model.target(tokens, plan, cache.kv)[0])


SHARED = np.arange(1, 8)


def rows_of(cache: Cache, group: int) -> dict[str, int]:
    """Fill this group's cache with three rows, two of which share a prompt, at different progress."""
    rng = np.random.default_rng(group)
    mine = {}
    for i, (prompt, length) in enumerate(((SHARED, 12), (SHARED, 20), (rng.integers(1, 48, 5), 9))):
        tokens = np.concatenate([prompt, rng.integers(1, 48, length - len(prompt))])
        row = cache.open(tokens, len(prompt))
        cache.ensure_slots(row, length)
        prefix = cache.prefix[row]
        prefix.computed = len(prefix.tokens)
        prefix.drafted = len(prefix.tokens) - group % 2
        cache.computed[row] = length - 1
        cache.drafted[row] = length - 1 - i * 2
        mine[f"{group}-{i}."] = row
    return mine


def paint(cache: Cache, groups: Groups, tp: int) -> None:
    """Give every (token history, layer, part, head, entry) its own value, so that a value shows where it belongs."""
    heads = cache.model.kv_heads
    first = groups.of(tp).rank * heads
    for row, prefix in cache.prefix.items():
        for column in range(int(cache.computed[row])):
            slot = cache.slots[row, column]
            key = hash(tuple(cache.tokens[row, : column + 1].tolist()))
            for layer in range(len(cache.kv)):
                drafter = layer == cache.model.arch.layers
                known = int(cache.drafted[row]) if column >= len(prefix.tokens) else prefix.drafted
                if drafter and column >= known:
                    continue
                for part in range(2):
                    for head in range(heads):
                        rng = np.random.default_rng(abs(hash((key, layer, part, first + head))))
                        values = torch.from_numpy(rng.standard_normal(cache.kv[layer].shape[-1])).float()
                        cache.kv[layer][slot, part * heads + head] = values
            values = np.random.default_rng(abs(key)).standard_normal(cache.hidden.shape[1])
            cache.hidden[slot] = torch.from_numpy(values).float()


def wrong(
    cache: Cache, groups: Groups, tp: int, expected: dict[str, retile.CacheRow], seated: dict[str, int]
) -> list[str]:
    """What a cache holds otherwise than `paint` paints it."""
    oracle.audit(cache)
    painted = Cache(cache.model, cache.rows, cache.columns, cache.total)
    found = []
    for id, row in seated.items():
        header = expected[id]
        prompt = header.prompt_len - 1
        own = painted.open(header.tokens, header.prompt_len)
        painted.ensure_slots(own, len(header.tokens))
        painted.computed[own], painted.drafted[own] = header.computed, header.drafted
        painted.prefix[own].computed = painted.prefix[own].drafted = prompt
        if cache.computed[row] != header.computed or cache.drafted[row] != header.drafted:
            found.append(f"{id}: progress {cache.computed[row]}, {cache.drafted[row]}")
    paint(painted, groups, tp)
    for (id, row), own in zip(seated.items(), painted.prefix, strict=True):
        prompt = expected[id].prompt_len - 1
        prefix = cache.prefix[row]
        for layer in range(len(cache.kv)):
            drafter = layer == cache.model.arch.layers
            for first, last in (
                (0, prefix.drafted if drafter else prefix.computed),
                (prompt, expected[id].drafted if drafter else expected[id].computed),
            ):
                got = cache.kv[layer][cache.slots[row, first:last]]
                if not torch.equal(got, painted.kv[layer][painted.slots[own, first:last]]):
                    found.append(f"{id}: layer {layer}, columns {first} to {last}")
        for first, last in ((prefix.drafted - 1, prefix.computed), (expected[id].drafted - 1, expected[id].computed)):
            got = cache.hidden[cache.slots[row, first:last]]
            if not torch.equal(got, painted.hidden[painted.slots[own, first:last]]):
                found.append(f"{id}: hidden states of columns {first} to {last}")
    return found


def caches(groups: Groups, slots: int, kind: str) -> list[str]:
    """What is wrong in the caches after switches along PATH, and which rows have no room."""
    model = model_at(groups, 1, kind)
    cache = Cache(model, 16, 64, slots)
    mine = rows_of(cache, dist.get_rank())
    paint(cache, groups, 1)
    found = []
    for old, new in zip(PATH, PATH[1:], strict=False):
        switch = retile.Switch(groups, old, new)
        own = [retile.CacheRow.of(cache, row, id, switch.old_group) for id, row in mine.items()]
        everybody: list[Any] = [None] * switch.wide.size
        if switch.wide.size > 1:
            dist.all_gather_object(everybody, own, group=switch.wide.group)
        rows = {row.id: row for part in everybody for row in part}
        share = -(-len(rows) // (switch.wide.size // new))
        rows = {id: rows[id]._replace(target=i // share) for i, id in enumerate(sorted(rows))}
        retile.retile_weights(model, switch)
        seated = retile.retile_cache(cache, list(rows.values()), mine, switch)
        found += [f"{old} to {new}: {line}" for line in wrong(cache, groups, new, rows, seated)]
        missing = {id for id, row in rows.items() if row.target == switch.new_group} - set(seated)
        found += [f"{old} to {new}: no room for {id}" for id in sorted(missing)]
        mine = seated
    return found


def memory(meeting: str, slots: tuple[int, ...], path: tuple[int, ...]) -> list[float]:
    """Return by how many layers the resident memory of this rank exceeded that before and after, change by change.

    A layer is its weights, and its keys and values, at the smaller of the two sizes.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed leaves the process at once
    oracle.meet(meeting)
    groups = Groups()
    return [layers for count in slots for layers in growth(groups, count, path)]


def growth(groups: Groups, slots: int, path: tuple[int, ...]) -> list[float]:
    config = oracle.tiny(vocab=4096, heads=8, kv_heads=4, hidden=512, layers=1)[0] | {"num_hidden_layers": 6}
    model = Decoder(Architecture.from_hf(config), torch.float32, "cpu", groups.of(path[0]), 512)
    cache = Cache(model, 8, slots // 8, slots)
    for tensor in (*(p.fused for p in model.parameters), *cache.kv, cache.hidden):
        tensor.fill_(1.0)
    group = dist.get_rank() // path[0]
    mine = {}
    for i in range(8 * path[0] // max(path)):
        mine[f"{group}-{i}."] = row = cache.open(np.arange(slots // 8) + i, 9)
        cache.ensure_slots(row, slots // 8)
        cache.prefix[row].computed = 8
        cache.computed[row] = slots // 8 - 1
    found = []
    for old, new in itertools.pairwise(path):
        switch = retile.Switch(groups, old, new)
        own = [retile.CacheRow.of(cache, row, id, switch.old_group) for id, row in mine.items()]
        everybody: list[Any] = [None] * switch.wide.size
        dist.all_gather_object(everybody, own, group=switch.wide.group)
        rows = sorted({row.id: row for part in everybody for row in part}.values())
        rows = [row._replace(target=i % (switch.wide.size // new)) for i, row in enumerate(rows)]
        weights = sum(p.fused.nbytes for p in model.parameters if any(".layers.0." in name for name in p.rows))
        layer = weights * old // min(old, new) + cache.kv[0].nbytes
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        mine = retile.retile(model, cache, rows, mine, switch)
        found.append((resident("VmHWM") - max(before, resident("VmRSS"))) / layer)
    return found


def resident(name: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10
