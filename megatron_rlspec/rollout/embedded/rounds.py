"""Prefill and decode rounds over rows of the cache: draft, verify, commit. Only `engine.py` handles requests."""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.rollout.embedded import draft, verify
from megatron_rlspec.rollout.embedded.cache import Cache, Prefix, TreeColumns
from megatron_rlspec.rollout.embedded.draft import Tree
from megatron_rlspec.rollout.embedded.verify import Committed, Settings
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import SHARPNESS, Drafts, Sampling, SpecConfig, Verifier


class Span(NamedTuple):
    """Columns [first, last) of a row that a prefill runs on. `prefix`: the shared prompt that has them, if any."""

    row: int
    first: int
    last: int
    prefix: Prefix | None


class RoundRunner:
    """Runs prefills and decode rounds. They advance rows of `cache` in place.

    Raises ValueError for an unknown verifier.

    selection  the rule, if it chooses how many drafts of each row the target verifies; None: it verifies all
    """

    def __init__(
        self,
        cache: Cache,
        verifier: Verifier,
        drafts: Drafts,
        prefill_chunk: int,
        sharpness: float = SHARPNESS[0],
    ) -> None:
        if verifier not in get_args(Verifier):  # another name would run target_only
            raise ValueError(f"verifier={verifier!r}; known: {', '.join(get_args(Verifier))}")
        self.cache = cache
        self.model = cache.model
        self.verifier = verifier
        self.coupled = drafts == "coupled" and verifier == "position_keyed"
        self.sharpness = sharpness
        self.selection: SpecRule | None = None
        # [B, k] of the drafts that it chose among in the last round
        self.logq: np.ndarray | None = None
        self.prefill_chunk = prefill_chunk
        rows = cache.rows
        # in the order of the fields of `Settings`
        self.settings = (
            np.zeros(rows),
            np.ones(rows),
            np.zeros(rows, np.int64),
            np.zeros(rows),
        )
        self.seeds = np.zeros(rows, np.int64)  # of the noise
        # noise keys that target_only has used so far
        self.draws = np.zeros(rows, np.int64)
        # committed tokens at the start of the row's last round
        self.before = np.zeros(rows, np.int64)

    def seat(self, row: int, sampling: Sampling, seed: int, draws: int) -> None:
        """Set the sampling of a row. `draws` continues the noise of a sample that was put back into the queue."""
        for name, values in zip(Settings._fields, self.settings, strict=True):
            values[row] = getattr(sampling, name)
        self.seeds[row] = verify.seed_of(seed, self.verifier)
        self.draws[row] = draws
        self.before[row] = self.cache.length[row] - 1

    def ready(self, row: int) -> bool:
        """Return whether the target has run on all tokens of the row but the pending one."""
        prefix = self.cache.prefix[row]
        return (
            prefix.computed == len(prefix.tokens)
            and self.cache.computed[row] == self.cache.length[row] - 1
        )

    def prefill(self, rows: list[int]) -> None:
        """Run the target on at most `prefill_chunk` tokens that it has not seen yet; shared prefixes run once."""
        cache = self.cache
        spans = self._prefill_spans(rows)
        if not spans:
            return
        which = np.array([span.row for span in spans])
        starts = np.array([span.first for span in spans])
        ends = np.array([span.last for span in spans])
        columns, valid = _columns(starts, ends)
        read = self._read(which, ends)
        plan = cache.plan(read, self._to(columns), valid=valid)
        tokens = cache.tokens[which[:, None], columns]
        _, drafted_from = self.model.target(self._to(tokens[valid]), plan, cache.kv)
        cache.hidden.index_copy_(0, plan.write, drafted_from)
        for span in spans:
            if span.prefix is not None:
                span.prefix.computed = span.last
            else:
                cache.computed[span.row] = span.last

    def _prefill_spans(self, rows: list[int]) -> list[Span]:
        """Return the columns that the next prefill runs on, in the order of rows."""
        cache = self.cache
        left = self.prefill_chunk
        spans = []
        prefixes = set()
        for row in rows:
            prefix = cache.prefix[row]
            if prefix.computed < len(prefix.tokens):
                # its first row computes it for all
                if prefix.key in prefixes:
                    continue
                prefixes.add(prefix.key)
                span = Span(row, prefix.computed, len(prefix.tokens), prefix)
            else:
                pending = int(cache.length[row]) - 1
                span = Span(row, int(cache.computed[row]), pending, None)
            last = min(span.last, span.first + left)
            if span.first < last:
                spans.append(span._replace(last=last))
                left -= last - span.first
        return spans

    def can_draft(self, row: int) -> bool:
        """Return whether a row has more than one token: the drafter needs the hidden state of the one before."""
        return bool(self.cache.length[row] > 1)

    def missed(self, rows: np.ndarray) -> int:
        """Return how many tokens the drafter must run on beyond those of a usual round: prompts, and rounds off."""
        behind = self.before[rows] - self.cache.drafted[rows]
        missed = int(np.maximum(behind, 0).sum())
        for _, prefix in self._prefixes(rows):
            missed += len(prefix.tokens) - prefix.drafted
        return missed

    def _prefixes(self, rows: np.ndarray) -> list[tuple[int, Prefix]]:
        """Return the distinct prefixes of rows, each with a row that has it."""
        prefixes = {}
        for row in rows.tolist():
            prefix = self.cache.prefix[row]
            prefixes[prefix.key] = (row, prefix)
        return list(prefixes.values())

    def columns(self, rows: np.ndarray, config: SpecConfig) -> np.ndarray:
        """Return [B], the number of columns that must have slots for a round of `config`."""
        return self.cache.length[rows] - 1 + scratch(config)

    def draft_only(self, rows: np.ndarray, config: SpecConfig) -> Tree:
        """Draft for rows that have the drafter's keys only. `round` verifies the drafts, in the same step."""
        read = self._read(rows, self.columns(rows, config))
        return self._draft(rows, read, config, None)

    def round(self, rows: np.ndarray, config: SpecConfig, ahead: Tree | None = None) -> Committed:
        """Draft, verify and commit at least one token for every row.

        ahead  drafts that the last ones of `rows` have already
        """
        self.logq = None
        cache = self.cache
        self.before[rows] = cache.length[rows]
        read = self._read(rows, self.columns(rows, config))
        tree = ahead
        fresh = len(rows)
        if ahead is not None:
            fresh -= len(ahead.tokens)
        if fresh:
            tree = self._draft(rows[:fresh], read[:fresh], config, self.selection)
            if ahead is not None:
                tree = tree.joined(ahead)
        assert tree is not None, "a round has rows"
        targets, logprobs = self._verify(rows, read, tree, chain=config.topk <= 1)
        path, accepted = verify.walk(tree.tokens, tree.parents, tree.valid, targets)
        tokens = np.take_along_axis(targets, path, 1)
        logprobs = np.take_along_axis(logprobs, path, 1)
        if config.topk > 1:
            cache.keep_path(rows, path, accepted, tree.tokens.shape[1])
        cache.commit(rows, tokens, accepted)
        verified = tree.valid.sum(1) - 1
        return Committed(tokens, logprobs, accepted, verified)

    def _draft(
        self,
        rows: np.ndarray,
        read: Tensor,
        config: SpecConfig,
        selection: SpecRule | None,
    ) -> Tree:
        """Run the drafter on what it has not read, and draft."""
        last = self.cache.length[rows] - 1
        pending = self.cache.tokens[rows, last]
        if config.off:
            return draft.roots(pending)
        hidden = self._extend(rows, read)
        if config.num_steps == 0:
            return draft.roots(pending)
        candidates = draft.grow(
            hidden,
            self.model.draft_logits(hidden),
            config.num_steps,
            config.topk,
            self._expand(rows, read, chain=config.topk == 1),
            self._pick(rows, config.topk),
        )
        scores = candidates.scores.float().cpu().numpy()
        if config.topk > 1:
            keep = top(scores, config.num_draft_tokens - 1)
        elif selection is not None:
            self.logq = np.diff(scores, axis=1, prepend=0.0)
            lengths = selection.lengths(self.logq)
            keep = candidates.depth <= lengths[:, None]
        else:
            keep = np.ones(scores.shape, bool)
        return draft.cut(pending, candidates, keep)

    def _expand(self, rows: np.ndarray, read: Tensor, chain: bool) -> draft.Expand:
        """Return the function that runs the drafter on a level of candidates."""
        model = self.model
        start = self._to(self.cache.length[rows])

        def expand(
            parents: Tensor, tokens: Tensor, ancestors: Tensor, level: int
        ) -> tuple[Tensor, Tensor]:
            batch, expanded, nodes = ancestors.shape
            newest = torch.arange(nodes - expanded, nodes, device=start.device)
            columns = start[:, None] + newest
            tree = None
            if not chain:
                depth = torch.full_like(columns, level - 2)
                tree = TreeColumns(start, ancestors, depth)
            plan = self.cache.plan(read, columns, drafter=True, tree=tree)
            parents = parents.reshape(batch * expanded, -1)
            out = model.draft(parents, tokens.reshape(-1), plan, self.cache.kv)
            logits = model.draft_logits(out)
            shape = batch, expanded, -1
            return out.view(shape), logits.view(shape)

        return expand

    def _pick(self, rows: np.ndarray, topk: int) -> draft.Pick:
        """Return the function that picks a candidate's children."""
        words = self.model.draft_ids
        pick: draft.Pick
        if self.coupled:
            seeds = self._to(self.seeds[rows])
            keys = self._to(self.cache.length[rows]) - 1
            settings = self._settings(rows)
            coupling = draft.Coupling(seeds, keys, settings, words, self.sharpness)
            pick = draft.coupled(topk, coupling)
        else:
            pick = draft.likeliest(topk)
        return pick if words is None else draft.among(words, pick)

    def _extend(self, rows: np.ndarray, read: Tensor) -> Tensor:
        """Run the drafter on all tokens it has not seen, up to the pending ones. Returns its last output [B, H]."""
        cache = self.cache
        chunk = self.prefill_chunk
        for row, prefix in self._prefixes(rows):
            while prefix.drafted < len(prefix.tokens):
                last = min(prefix.drafted + chunk, len(prefix.tokens))
                self._pairs(np.array([row]), np.array([prefix.drafted]), np.array([last]))
                prefix.drafted = last
        while (behind := cache.length[rows] - cache.drafted[rows] > chunk).any():
            first = cache.drafted[rows[behind]]
            self._pairs(rows[behind], first, first + chunk)
            cache.drafted[rows[behind]] += chunk
        first = cache.drafted[rows]
        last = cache.length[rows]
        out = self._pairs(rows, first, last, read)
        cache.drafted[rows] = last
        ends = np.cumsum(last - first)
        return out[self._to(ends - 1)]

    def _pairs(
        self,
        rows: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        read: Tensor | None = None,
    ) -> Tensor:
        """Run the drafter on the pairs (h of column c - 1, token of column c), c in [first, last). Returns [N, H]."""
        cache = self.cache
        if read is None:
            read = self._read(rows, last)
        columns, valid = _columns(first, last)
        plan = cache.plan(read, self._to(columns), drafter=True, valid=valid)
        tokens = cache.tokens[rows[:, None], columns]
        before = cache.slots[rows[:, None], columns - 1]
        hidden = cache.hidden.index_select(0, self._to(before[valid]))
        return self.model.draft(hidden, self._to(tokens[valid]), plan, cache.kv)

    def _verify(
        self,
        rows: np.ndarray,
        read: Tensor,
        tree: Tree,
        chain: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the target on the trees. Returns the token to commit at every node and its log-prob, both [B, T]."""
        batch, nodes = tree.tokens.shape
        logits = self._target_logits(rows, read, tree, chain)
        samples = rows[np.nonzero(tree.valid)[0]]  # the row of each flat node
        settings = self._settings(samples)
        logp = verify.logprobs(logits, settings.temperature)
        # the noise is of positions, or new in every round
        keys = self.draws[rows][:, None] + np.arange(nodes)
        if self.verifier == "position_keyed":
            pending = self.cache.length[rows] - 1
            keys = pending[:, None] + tree.depth
        self.draws[rows] += nodes
        seeds = self._to(self.seeds[samples])
        chosen = verify.sample(logp, settings, seeds, self._to(keys[tree.valid]))
        targets = np.full((batch, nodes), -1, np.int64)
        logprobs = np.zeros((batch, nodes), np.float32)
        targets[tree.valid] = chosen.cpu().numpy()
        chosen_logp = logp.gather(1, chosen[:, None])[:, 0]
        logprobs[tree.valid] = chosen_logp.float().cpu().numpy()
        return targets, logprobs

    def _target_logits(
        self, rows: np.ndarray, read: Tensor, tree: draft.Tree, chain: bool
    ) -> Tensor:
        """Run the target on the valid nodes of trees; returns their logits [N, V]."""
        cache = self.cache
        start = cache.length[rows] - 1
        where = None
        if not chain:
            ancestors = self._to(draft.ancestors(tree.parents))
            where = TreeColumns(self._to(start), ancestors, self._to(tree.depth))
        columns = start[:, None] + np.arange(tree.tokens.shape[1])
        columns = np.minimum(columns, read.shape[1] - 1)  # padding stays within `read`
        plan = cache.plan(read, self._to(columns), valid=tree.valid, tree=where)
        tokens = self._to(tree.tokens[tree.valid])
        hidden, drafted_from = self.model.target(tokens, plan, cache.kv)
        cache.hidden.index_copy_(0, plan.write, drafted_from)
        return self.model.logits(hidden)

    def _settings(self, rows: np.ndarray) -> Settings:
        """Return how the rows are sampled, [B] each."""
        parts = [self._to(values[rows]) for values in self.settings]
        return Settings(*parts)

    def _read(self, rows: np.ndarray, last: np.ndarray) -> Tensor:
        return self._to(self.cache.slots[rows, : int(last.max())])

    def _to(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.model.device)


def scratch(config: SpecConfig) -> int:
    """Return how many columns a round writes, from the pending token on: the larger of target and drafter nodes."""
    return max(config.num_draft_tokens, 1 + config.topk * max(config.num_steps - 1, 0))


def _columns(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return columns [first, last) of each row as a padded [B, T], and a mask [B, T] of those that are not padding."""
    longest = int((last - first).max())
    columns = first[:, None] + np.arange(longest)
    end = last[:, None]
    return np.minimum(columns, end - 1), columns < end


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the mask [B, M] of each row's `count` highest scores; of equal scores the first, as parents come first."""
    keep = np.zeros(scores.shape, bool)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.put_along_axis(keep, best, True, 1)
    return keep
