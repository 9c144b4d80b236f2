"""The decoder and its drafter over a KV cache of slots, in plain torch, for families marked `embedded` in `FAMILIES`.

`Decoder` has the parameters and the passes, `cache.py` the slots, and `rounds.py` calls both.

Shapes: N tokens of one forward, flat over samples; B samples; T queries and L keys per sample, padded; H hidden size;
A query heads and K key/value heads of this rank; D head dimension; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rlspec.models.config import DRAFTER, check_config, refusal, stated_ends
from megatron_rlspec.models.config import PREFIX as EAGLE3_PREFIX
from megatron_rlspec.models.drafter_config import Eagle3, check_drafter_config
from megatron_rlspec.models.families import FAMILIES, names_where
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.rollout.embedded.packed import PackedWeights
from megatron_rlspec.rollout.embedded.parallel import Solo, TensorParallel


@dataclass(frozen=True)
class Architecture:
    """Sizes read from a Hugging Face `config.json`. All are of the whole model, over all tensor-parallel ranks.

    layers  of the target, without those of a drafter
    eps     added to the mean square in every RMS norm
    tied    whether the output head is the embedding
    mtp     whether the checkpoint's MTP layer drafts; False with an EAGLE-3 drafter
    eos     token ids that end a text
    eagle3  the EAGLE-3 drafter, whose attention has the target's shape; None: there is none
    taps    layers of the target, from 0 and ascending, whose inputs the EAGLE-3 drafter reads; () without one
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    mtp: bool
    eos: tuple[int, ...]
    eagle3: Eagle3 | None = None
    taps: tuple[int, ...] = ()

    @property
    def draft_layers(self) -> int:
        """Return the layers of the drafter; 0: there is none."""
        return self.eagle3.num_hidden_layers if self.eagle3 else int(self.mtp)

    @property
    def drafter_input_width(self) -> int:
        """Return the width of what the drafter reads of the target at a token: H, or taps * H for EAGLE-3."""
        return self.hidden * (len(self.taps) or 1)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a config.json. Raises ValueError for a model that the embedded engine cannot run."""
        name = (config.get("architectures") or ["none"])[0]
        supported = names_where(lambda facts: facts.embedded)
        if name not in supported:
            raise ValueError(
                f"config.json: {refusal(name, 'run by the embedded engine', supported)}"
            )
        check_config(config, "the embedded engine's model")
        facts = FAMILIES[name]
        layers = config["num_hidden_layers"]
        attention = _attention(config)
        eagle3 = None
        if DRAFTER in config:
            eagle3 = check_drafter_config(config[DRAFTER], "the EAGLE-3 drafter")
            _check_same(attention, _attention(config[DRAFTER]))
        mtp = facts.embedded_drafter and (config.get("num_nextn_predict_layers") or 0) > 0
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=layers,
            heads=attention["num_attention_heads"],
            kv_heads=attention["num_key_value_heads"],
            head_dim=attention["head_dim"],
            vocab=config["vocab_size"],
            eps=attention["rms_norm_eps"],
            rope=attention["rotary embedding"],
            qk_norm=facts.has_qk_norm(config),
            qkv_bias=facts.stores_qkv_bias(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            mtp=mtp and eagle3 is None,
            eos=tuple(stated_ends(config)),
            eagle3=eagle3,
            taps=eagle3.taps(layers) if eagle3 else (),
        )

    def check_size(self, tp: int) -> None:
        """Raise ValueError if tensor parallelism over `tp` ranks does not divide the model."""
        sizes = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
        }
        if self.eagle3:
            sizes["draft_intermediate"] = self.eagle3.intermediate_size
            sizes["draft_words"] = self.eagle3.draft_vocab_size
        for what, size in sizes.items():
            if size % tp:
                raise ValueError(f"tensor parallel size {tp} does not divide {what}={size}")


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what target and EAGLE-3 drafter must have in common. `_check_same` shows these keys to the user."""
    heads = config["num_attention_heads"]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rotary embedding": Rope.of(config),
    }


def _check_same(target: Mapping[str, Any], drafter: Mapping[str, Any]) -> None:
    """Raise ValueError unless an EAGLE-3 drafter's attention is the target's: they share cache, angles and epsilon."""
    for name, value in drafter.items():
        if value != target[name]:
            raise ValueError(
                f"the embedded engine runs EAGLE-3 drafters with their target's attention: {name}={value}, but the "
                f"target has {target[name]}; rollout.engine=sglang runs others"
            )


def is_drafter(name: str) -> bool:
    """Return whether a Hugging Face name is one of the drafter's tensors."""
    return name.startswith(EAGLE3_PREFIX) or ".mtp_layers." in name


class ForwardPlan(NamedTuple):
    """Positions, cache slots and attention mask of the N tokens of one forward. `Cache.plan` makes it."""

    cos: Tensor  # [N, 1, D]
    sin: Tensor  # [N, 1, D], negative in the first half of D: see the end of Decoder.__init__
    write: Tensor  # [N] cache slot of each token
    read: Tensor  # [B * L] cache slots of each sample, padded with any valid slot
    mask: Tensor  # [B, 1, T * A / K, L] 0 or -inf
    # [N] index of each token in the padded [B * T]; None when nothing is padded
    padded_index: Tensor | None
    first: Tensor  # [N] bool: rotary position 0


@dataclass
class Layer:
    """Parameters of one transformer layer on this rank, fused where one matrix product can serve several of them.

    Shapes are [out, in] of `F.linear`; I is the MLP's width on this rank.

    norm1     [H], of what attention reads
    qkv       [(A + 2 * K) * D, H], the rows of q, then k, then v; [.., 2 * H] in an EAGLE-3 drafter's first layer
    qkv_bias  [(A + 2 * K) * D]; None in a family without
    q_norm    [D], for every head, as `k_norm`; None in a family without
    out       [H, A * D]; its product is summed over ranks, as that of `down`
    norm2     [H], before the MLP
    gate_up   [2 * I, H], the rows of gate, then of up
    down      [H, I]
    """

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor


class Shard(NamedTuple):
    """This rank's part of one Hugging Face tensor. A write to `view` changes the fused parameter of the forward."""

    view: Tensor
    dim: int | None  # the dimension split over ranks; None: every rank has the whole tensor


class Parameter(NamedTuple):
    """A parameter of the forward, and the Hugging Face tensors that are blocks of its rows."""

    fused: Tensor
    rows: dict[str, int]  # rows of each block on this rank
    split: int | None  # as `Shard.dim`

    def blocks(self) -> dict[str, Tensor]:
        """Return the blocks by name, as views."""
        parts = self.fused.split(list(self.rows.values()))
        return dict(zip(self.rows, parts, strict=True))


class Decoder:
    """Parameters and forward passes. It knows no requests, sampling or speculation.

    Tensor parallelism splits attention by heads, the MLP by intermediate columns and the output head by vocabulary.
    Embeddings, norms and the drafter's input projection are replicated. All ranks must call the forward passes
    together, because they contain collectives. Raises ValueError for sizes that the tensor-parallel size does not
    divide.

    positions        number of rotary positions, from 0
    heads, kv_heads  of this rank
    tensors          the `Shard` of every Hugging Face name, in one order on all ranks: `full_tensors` and the change of
                     the tensor-parallel size (`extensions/migration/embedded/retile.py`) run collectives in this order
    parameters       what `tensors` are views into; `retile.py` replaces their contents
    """

    def __init__(
        self,
        arch: Architecture,
        dtype: torch.dtype,
        device: str,
        comm: Solo | TensorParallel,
        positions: int,
    ) -> None:
        arch.check_size(comm.size)
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self.comm = comm
        self.heads = arch.heads // comm.size
        self.kv_heads = arch.kv_heads // comm.size
        self.packed = PackedWeights()
        self.tensors: dict[str, Shard] = {}
        self.parameters: list[Parameter] = []
        # [S] token ids of the draft logits' columns, over all ranks; -1: a column without a token. None: column i is
        # token i. For an EAGLE-3 drafter the engine sets it, from the drafter's checkpoint.
        self.draft_ids: Tensor | None = None
        # draft_head [S / ranks, H]: this rank's part of the head that drafts are chosen by; empty until there is one.
        # _draft_rows [S / ranks]: the rows of `head` that it copies (`set_draft_vocabulary`); empty for an EAGLE-3
        # drafter.
        self.draft_head = self._draft_rows = torch.empty(0)
        h = arch.hidden
        v = arch.vocab
        self.embedding = self._new({"model.embed_tokens.weight": v}, h, None)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(arch.layers)]
        self.norm = self._new({"model.norm.weight": h})
        if arch.tied:
            # a view: an update of the embedding changes it
            self.head = self.embedding.chunk(comm.size)[comm.rank]
        else:
            self.head = self._new({"lm_head.weight": v // comm.size}, h, 0)
        if arch.mtp:
            prefix = "model.mtp_layers.0."
            self.first_draft_layer = self._layer(prefix)
            self.hidden_norm = self._new({prefix + "hidden_layernorm.weight": h})
            self.token_norm = self._new({prefix + "token_layernorm.weight": h})
            self.input_proj = self._new({prefix + "input_proj.weight": h}, 2 * h)
            self.final_norm = self._new({prefix + "final_layernorm.weight": h})
        if arch.eagle3:
            self._add_eagle3(arch.eagle3)
        # As in Transformers and Megatron: angles in float32, cosine and sine cast to the model's dtype afterwards.
        columns = torch.arange(positions, dtype=torch.float32)
        frequencies = arch.rope.frequencies(arch.head_dim)
        angle = torch.outer(columns, frequencies).repeat(1, 2)
        magnitude = torch.full((arch.head_dim,), arch.rope.magnitude)
        self.cos = (angle.cos() * magnitude).to(device, dtype)[:, None]
        # Rotation maps halves (a, b) to (-b, a). `_block` only swaps them, so the sine carries the sign. This comes
        # after the cosine, because it changes `magnitude` in place.
        magnitude[: arch.head_dim // 2] *= -1
        self.sin = (angle.sin() * magnitude).to(device, dtype)[:, None]

    def _add_eagle3(self, drafter: Eagle3) -> None:
        """Make the drafter's parameters. Its first layer takes the place of the MTP layer, and reads [N, 2 * H]."""
        h = self.arch.hidden
        width = self.arch.drafter_input_width
        inner = drafter.intermediate_size
        self.first_draft_layer = self._layer(
            EAGLE3_PREFIX + "midlayer.", width=2 * h, intermediate=inner
        )
        self.further_layers = []
        for index in range(1, drafter.num_hidden_layers):
            prefix = f"{EAGLE3_PREFIX}layers.{index}."
            self.further_layers.append(self._layer(prefix, intermediate=inner, norm="hidden_norm"))
        self.hidden_norm = self._new({EAGLE3_PREFIX + "midlayer.hidden_norm.weight": h})
        self.joined_taps_norm = None
        if drafter.norms_joined:
            self.joined_taps_norm = self._new({EAGLE3_PREFIX + "input_norm.weight": width})
        self.tap_norms = []
        if drafter.norms_each:
            for tap in range(len(self.arch.taps)):
                self.tap_norms.append(self._new({f"{EAGLE3_PREFIX}fc_norm.{tap}.weight": h}))
        self.token_norm = self.first_draft_layer.norm1
        self.input_proj = self._new({EAGLE3_PREFIX + "fc.weight": h}, width)
        self.final_norm = self._new({EAGLE3_PREFIX + "norm.weight": h})
        words = drafter.draft_vocab_size // self.comm.size
        self.draft_head = self._new({EAGLE3_PREFIX + "lm_head.weight": words}, h, 0)

    def target(
        self, tokens: Tensor, plan: ForwardPlan, cache: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run the target over tokens [N] int64. Returns its hidden states, and what the drafter reads of the target.

        The hidden states [N, H] are those after the final norm. An MTP drafter reads the same tensor, and an EAGLE-3
        drafter the inputs of its n taps side by side, [N, n · H]. Writes the tokens' keys and values into the slots
        `plan.write` of `cache`, which is `Cache.kv`: the target's layers, then the drafter's. Collective.
        """
        x = F.embedding(tokens, self.embedding)
        tap_inputs = []
        # not strict: the drafter's layers follow in the cache
        for index, (layer, kv) in enumerate(zip(self.layers, cache, strict=False)):
            if index in self.arch.taps:
                tap_inputs.append(x)
            x = self._block(layer, x, plan, kv)
        x = self._rms(x, self.norm)
        return x, torch.cat(tap_inputs, -1) if tap_inputs else x

    def draft(
        self, hidden: Tensor, tokens: Tensor, plan: ForwardPlan, cache: list[Tensor]
    ) -> Tensor:
        """Run the drafter on pairs (hidden [N, H] of the position before, tokens [N]). Returns [N, H] of the pairs.

        `hidden` is what `target` returned second at the first draft of a round, and this function's own result at the
        later drafts. Writes the pairs' keys and values into `cache`, the `Cache.kv` of target and drafter. Collective.
        Call it only with `arch.draft_layers`: without a drafter there are no parameters for it.

        An MTP drafter works as MiMo's: the hidden state comes first in the concatenation, and the embedding is 0 at
        rotary position 0. The result is after the drafter's norm. EAGLE-3 takes [N, n · H] of the target, and its
        result is before its norm, unless the drafter has `norm_output`.
        """
        embedded = F.embedding(tokens, self.embedding)
        kv = cache[self.arch.layers]
        if self.arch.eagle3:
            state = hidden
            # The width tells the target's states from the drafter's own: there are at least two taps.
            if hidden.shape[-1] != self.arch.hidden:
                state = self._projected(hidden)
            parts = [self._rms(embedded, self.token_norm), self._rms(state, self.hidden_norm)]
            pair = torch.cat(parts, -1)
            state = self._block(self.first_draft_layer, state, plan, kv, pair)
            # in `cache`: the target's layers, the drafter's first layer, then these
            for index, layer in enumerate(self.further_layers, self.arch.layers + 1):
                state = self._block(layer, state, plan, cache[index])
            return self._rms(state, self.final_norm) if self.arch.eagle3.norm_output else state
        embedded = embedded.masked_fill_(plan.first[:, None], 0)
        parts = [self._rms(hidden, self.hidden_norm), self._rms(embedded, self.token_norm)]
        state = self.packed.linear(torch.cat(parts, -1), self.input_proj)
        return self._rms(self._block(self.first_draft_layer, state, plan, kv), self.final_norm)

    def _projected(self, hidden: Tensor) -> Tensor:
        """Return `fc` of the target's hidden states [N, n · H], normed before as the drafter says, [N, H]."""
        if self.joined_taps_norm is not None:
            hidden = self._rms(hidden, self.joined_taps_norm)
        if self.tap_norms:
            parts = hidden.split(self.arch.hidden, -1)
            normed = map(self._rms, parts, self.tap_norms)
            hidden = torch.cat(list(normed), -1)
        return self.packed.linear(hidden, self.input_proj)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of the target's hidden states [N, H], in float32 or float64. Collective."""
        return self._logits(hidden, self.head)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, S] of the tokens that drafts are chosen from, of a result of `draft`. Collective.

        Column i is token `draft_ids[i]`, and -inf where that is -1. With `draft_ids` None it is token i, and S is V.
        """
        if self.arch.eagle3:
            # `draft` has already applied the norm if the drafter hands on normed states
            normed = self.arch.eagle3.norm_output
            state = hidden if normed else self._rms(hidden, self.final_norm)
            return self._logits(state, self.draft_head)
        if self.draft_ids is None:
            return self.logits(hidden)
        logits = self._logits(hidden, self.draft_head)
        return logits.masked_fill_(self.draft_ids < 0, float("-inf"))

    @property
    def draft_vocabulary(self) -> int:
        """Return how many tokens drafts are chosen from; 0: all."""
        return 0 if self.draft_ids is None else int((self.draft_ids >= 0).sum())

    def set_draft_vocabulary(self, words: Tensor) -> None:
        """Choose drafts from `words [S]`, token ids in any order. All tensor-parallel ranks must pass the same.

        Raises ValueError for an empty set, for ids outside the vocabulary and for an id twice, and with an EAGLE-3
        drafter, whose vocabulary is fixed.
        """
        if self.arch.eagle3:
            raise ValueError(
                "draft vocabulary: that of an EAGLE-3 drafter is a part of its checkpoint"
            )
        words = words.to(self.device, torch.int64).sort().values
        vocab = self.arch.vocab
        inside = (words >= 0) & (words < vocab)
        if not len(words) or not inside.all() or len(words.unique()) < len(words):
            raise ValueError(
                f"draft vocabulary: expected different ids from 0 to {vocab - 1}, at least one"
            )
        # Each rank has one block of the head's rows, and computes the words in it.
        rows = vocab // self.comm.size
        words_by_rank = [words[words // rows == rank] for rank in range(self.comm.size)]
        # `_logits` gathers equal shapes, so all ranks pad to the same width. -1 marks columns to be masked.
        width = max(len(part) for part in words_by_rank)
        padded = [F.pad(part, (0, width - len(part)), value=-1) for part in words_by_rank]
        self.draft_ids = torch.cat(padded)
        local_rows = words_by_rank[self.comm.rank] - rows * self.comm.rank
        self._draft_rows = F.pad(local_rows, (0, width - len(local_rows)))  # padding reads row 0
        self.renew_draft_head()

    def renew_draft_head(self) -> None:
        """Copy the rows of the draft vocabulary from the output head. Call it after every change of that head.

        An EAGLE-3 drafter has a head of its own, which pushes update.
        """
        if self.draft_ids is not None and not self.arch.eagle3:
            # The old head is replaced. Without `forget`, the head and its packed copy would stay in memory.
            self.packed.forget(self.draft_head)
            self.draft_head = self.head.index_select(0, self._draft_rows)

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Return logits over the heads of all ranks, in rank order. Collective."""
        full = self.comm.concat(self.packed.linear(hidden, head), -1)
        if full.dtype == torch.float64:
            return full
        return full.float()

    @torch.no_grad()
    def write(self, name: str, full: Tensor) -> None:
        """Copy this rank's part of a full tensor into the parameter, in place. Raises ValueError for a wrong shape.

        name  one of `tensors`; KeyError for any other

        After the last write of an update call `renew_draft_head`: a draft head may be a copy of rows of the output
        head.
        """
        shard = self.tensors[name]
        part = full
        if shard.dim is not None:
            part = full.chunk(self.comm.size, shard.dim)[self.comm.rank]
        if part.shape != shard.view.shape:
            raise ValueError(
                f"{name} has shape {tuple(full.shape)}, expected {self.full_shape(name)}"
            )
        shard.view.copy_(part)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor over all tensor-parallel ranks."""
        view, dim = self.tensors[name]
        shape = list(view.shape)
        if dim is not None:
            shape[dim] *= self.comm.size
        return tuple(shape)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor); under tensor parallelism every rank must iterate."""
        for name, (view, dim) in self.tensors.items():
            yield name, view if dim is None else self.comm.concat(view, dim)

    def _block(
        self,
        layer: Layer,
        x: Tensor,
        plan: ForwardPlan,
        kv: Tensor,
        read: Tensor | None = None,
    ) -> Tensor:
        """Run a layer over x [N, H], and write its keys and values into `kv [slots, 2 * K, D]`. Returns [N, H].

        read  what the attention reads, already normed; None: the norm of x
        """
        n = x.shape[0]
        d = self.arch.head_dim
        if read is None:
            read = self._rms(x, layer.norm1)
        qkv = self.packed.linear(read, layer.qkv, layer.qkv_bias).view(n, -1, d)
        # What follows changes qkv [N, A + 2 * K, D] in place through views: it is a new tensor of this call.
        qk = qkv[:, : self.heads + self.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:  # a family has both or none
            query, key = qk.split([self.heads, self.kv_heads], 1)
            query.copy_(self._rms(query, layer.q_norm))
            key.copy_(self._rms(key, layer.k_norm))
        # a copy, with the halves of D swapped; `plan.sin` has the sign
        turned = qk.roll(d // 2, -1)
        qk.mul_(plan.cos).addcmul_(turned, plan.sin)
        # before the attention, which reads the new tokens' keys from the cache, too
        kv.index_copy_(0, plan.write, qkv[:, self.heads :])
        attended = self._attend(qkv[:, : self.heads], plan, kv)
        x = self._add_product(x, attended, layer.out)
        normed = self._rms(x, layer.norm2)
        gate, up = self.packed.linear(normed, layer.gate_up).chunk(2, -1)
        return self._add_product(x, F.silu(gate).mul_(up), layer.down)

    def _attend(self, query: Tensor, plan: ForwardPlan, kv: Tensor) -> Tensor:
        """Return the attention output [N, A * D] of query [N, A, D], over the keys in the slots `plan.read`.

        The A / K query heads of a key head are laid out as further queries, so they read its keys once.
        """
        k = self.kv_heads
        d = self.arch.head_dim
        b, _, rows, length = plan.mask.shape
        group = self.heads // k
        if plan.padded_index is not None:
            # back to [B * T, A, D]: `rows` is T * A / K, and `group` is A / K
            padded = query.new_zeros(b * rows // group, self.heads, d)
            query = padded.index_copy_(0, plan.padded_index, query)
        by_head = query.reshape(b, -1, k, group, d).transpose(1, 2)
        query = by_head.reshape(b, k, rows, d)
        cached = kv.index_select(0, plan.read).view(b, length, 2, k, d)
        keys, values = cached.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=plan.mask)
        by_token = out.view(b, k, -1, group, d).transpose(1, 2)
        out = by_token.reshape(-1, self.heads * d)
        return out if plan.padded_index is None else out.index_select(0, plan.padded_index)

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return x + y @ weightᵀ, with the product summed over ranks. Collective.

        Only rank 0 adds x, so that it counts once.
        """
        if self.comm.rank == 0:
            return self.comm.sum(self.packed.add(x, y, weight))
        return self.comm.sum(self.packed.linear(y, weight))

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm of x [.., W] over its last dimension, times weight [W]."""
        width = (x.shape[-1],)
        # as in Transformers: normalise in float32, scale in x.dtype
        if x.dtype in (torch.bfloat16, torch.float16):
            normed = F.rms_norm(x.float(), width, None, self.arch.eps)
            return normed.to(x.dtype) * weight
        return F.rms_norm(x, width, weight, self.arch.eps)

    def _layer(
        self, prefix: str, width: int = 0, intermediate: int = 0, norm: str = "input_layernorm"
    ) -> Layer:
        """Make a layer whose tensors have names from `prefix` on.

        width         of what its attention reads; 0: H
        intermediate  of its MLP, over all ranks; 0: the target's. Only layers of an EAGLE-3 drafter state it: they have
                      neither biases nor norms of q and k
        norm          name of the norm before the attention
        """
        h = self.arch.hidden
        i = (intermediate or self.arch.intermediate) // self.comm.size
        d = self.arch.head_dim
        biased = self.arch.qkv_bias and not intermediate
        normed = self.arch.qk_norm and not intermediate
        attention = prefix + "self_attn."
        mlp = prefix + "mlp."
        rows = {"q": self.heads * d, "k": self.kv_heads * d, "v": self.kv_heads * d}
        qkv = {f"{attention}{x}_proj.weight": size for x, size in rows.items()}
        bias = {f"{attention}{x}_proj.bias": size for x, size in rows.items()}
        gate_up = {mlp + "gate_proj.weight": i, mlp + "up_proj.weight": i}
        return Layer(
            norm1=self._new({f"{prefix}{norm}.weight": h}),
            qkv=self._new(qkv, width or h, 0),
            qkv_bias=self._new(bias, split=0) if biased else None,
            q_norm=self._new({attention + "q_norm.weight": d}) if normed else None,
            k_norm=self._new({attention + "k_norm.weight": d}) if normed else None,
            out=self._new({attention + "o_proj.weight": h}, self.heads * d, 1),
            norm2=self._new({prefix + "post_attention_layernorm.weight": h}),
            gate_up=self._new(gate_up, h, 0),
            down=self._new({mlp + "down_proj.weight": h}, i, 1),
        )

    def _new(
        self, rows: Mapping[str, int], columns: int | None = None, split: int | None = None
    ) -> Tensor:
        """Make one zero parameter from the named blocks of rows, and enter it into `parameters` and `tensors`.

        rows     this rank's rows of each block, by Hugging Face name
        columns  of the matrix; None: the parameter is a vector, as for norms and biases
        split    as `Shard.dim`
        """
        shape = [sum(rows.values())]
        if columns is not None:
            shape.append(columns)
        fused = torch.zeros(shape, dtype=self.dtype, device=self.device)
        parameter = Parameter(fused, dict(rows), split)
        self.parameters.append(parameter)
        self.name_blocks(parameter)
        return fused

    def name_blocks(self, parameter: Parameter) -> None:
        """Enter the blocks of a parameter into `tensors`. Needed again after a change of its storage or size."""
        for name, view in parameter.blocks().items():
            self.tensors[name] = Shard(view, parameter.split)
