"""Prefill and decode rounds over rows of the cache: draft, verify, commit. Only `engine.py` handles requests."""

from __future__ import annotations

from typing import Protocol, get_args

import numpy as np
import torch

from megatron_rlspec.rollout.embedded import draft, verify
from megatron_rlspec.rollout.embedded.cache import Cache, Prefix, TreeColumns
from megatron_rlspec.rollout.embedded.draft import Ahead
from megatron_rlspec.rollout.embedded.verify import Committed
from megatron_rlspec.speculation.acceptance import top
from megatron_rlspec.types import OFF, SHARPNESS, Drafts, Sampling, SpecConfig, Verifier

# temperature, top_p, top_k, min_p
Knobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Budget(Protocol):
    """Chooses which drafted candidates are verified; without one, the best of them by score."""

    def keep(
        self, scores: np.ndarray, depth: np.ndarray, context_tokens: int, limit: int
    ) -> np.ndarray:
        """Return the mask [B, M] of the candidates to verify: at most `limit` a row, each with its parents."""

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from verified nodes: their scores [N], and whether each was accepted [N]."""

    def timed(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        """Learn the duration of a round in which the target verified `verified` tokens."""


class RoundRunner:
    """Runs prefills and decode rounds. They advance rows of `cache` in place.

    Raises ValueError for an unknown verifier, and for one with which `budget` is not lossless.
    """

    def __init__(
        self,
        cache: Cache,
        verifier: Verifier,
        drafts: Drafts,
        budget: Budget | None,
        prefill_chunk: int,
        sharpness: float = SHARPNESS[0],
    ) -> None:
        if verifier not in get_args(Verifier):  # another name would run target_only
            raise ValueError(f"verifier={verifier!r}; known: {', '.join(get_args(Verifier))}")
        if budget is not None and verifier == "rejection":
            raise ValueError(
                "a tree budget is not lossless with verifier=rejection; take position_keyed"
            )
        self.cache = cache
        self.model = cache.model
        self.verifier = verifier
        self.coupled = drafts == "coupled" and verifier == "position_keyed"
        self.sharpness = sharpness
        self.budget = budget
        self.prefill_chunk = prefill_chunk
        rows = len(cache.length)
        self.temperature = np.zeros(rows)
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows)
        self.seeds = np.zeros((rows, 5), np.int64)  # the result of `verify.streams`
        # noise keys that target_only and rejection have used so far
        self.draws = np.zeros(rows, np.int64)
        self.verified = 0  # tokens that the target has verified so far
        # committed tokens at the start of the row's last round
        self.before = np.zeros(rows, np.int64)

    def seat(self, row: int, sampling: Sampling, seed: int, draws: int) -> None:
        """Set the sampling of a row. `draws` continues the noise of a sample that was put back into the queue."""
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seeds[row] = verify.streams(seed)
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
        left = self.prefill_chunk
        spans: list[tuple[int, int, int, Prefix | None]] = []
        prefixes = set()
        for row in rows:
            prefix = cache.prefix[row]
            if prefix.computed < len(prefix.tokens):
                if prefix.key in prefixes:
                    continue
                prefixes.add(prefix.key)
                first = prefix.computed
                last = len(prefix.tokens)
                owner = prefix
            else:
                first = int(cache.computed[row])
                last = int(cache.length[row]) - 1
                owner = None
            last = min(last, first + left)
            if first < last:
                spans.append((row, first, last, owner))
                left -= last - first
        if not spans:
            return
        which = np.array([span[0] for span in spans])
        starts = np.array([span[1] for span in spans])
        ends = np.array([span[2] for span in spans])
        columns, valid = _columns(starts, ends)
        plan = cache.plan(self._read(which, ends), self._to(columns), valid=valid)
        tokens = self._to(cache.tokens[which[:, None], columns][valid])
        _, drafted_from = self.model.target(tokens, plan, cache.kv)
        cache.hidden.index_copy_(0, plan.write, drafted_from)
        for row, _, upto, owner in spans:
            if owner is not None:
                owner.computed = upto
            else:
                cache.computed[row] = upto

    def can_draft(self, rows: np.ndarray) -> np.ndarray:
        """Return [B], false for rows of one token: the drafter needs the hidden state of the token before."""
        return self.cache.length[rows] > 1

    def missed(self, rows: np.ndarray) -> int:
        """Return how many tokens the drafter must run on beyond those of a usual round: prompts, and rounds off."""
        prefixes = {
            prefix.key: prefix for prefix in (self.cache.prefix[row] for row in rows.tolist())
        }.values()
        own = np.maximum(self.before[rows] - self.cache.drafted[rows], 0).sum()
        return int(own) + sum(len(prefix.tokens) - prefix.drafted for prefix in prefixes)

    def columns(self, rows: np.ndarray, config: SpecConfig) -> np.ndarray:
        """Return [B], the number of columns that must have slots for a round of `config`."""
        return self.cache.length[rows] - 1 + scratch(config)

    def draft_only(self, rows: np.ndarray, config: SpecConfig) -> Ahead:
        """Draft for rows that have the drafter's keys only. `round` verifies the drafts, in the same step."""
        tree, q = self._draft(rows, self._read(rows, self.columns(rows, config)), config)
        return Ahead(rows, tree, q)

    def round(
        self, rows: np.ndarray, config: SpecConfig, ahead: Ahead | None = None
    ) -> list[Committed]:
        """Commit at least one token for every row. Rows that cannot draft run in a pass of their own without drafts.

        ahead  drafts of the last ones of `rows`
        """
        drafting = self.can_draft(rows) | config.off
        if drafting.all():
            return self._round(rows, config, ahead)
        committed: dict[int, Committed] = {}
        for part, chosen, drafted in ((drafting, config, ahead), (~drafting, OFF, None)):
            if part.any():
                committed |= zip(
                    rows[part].tolist(), self._round(rows[part], chosen, drafted), strict=True
                )
        return [committed[row] for row in rows.tolist()]

    def _round(self, rows: np.ndarray, config: SpecConfig, ahead: Ahead | None) -> list[Committed]:
        """Draft, verify and commit at least one token for every row."""
        cache = self.cache
        self.before[rows] = cache.length[rows]
        read = self._read(rows, self.columns(rows, config))
        fresh = len(rows) - (len(ahead.rows) if ahead is not None else 0)
        if fresh:
            tree, q = self._draft(rows[:fresh], read[:fresh], config)
        if ahead is not None:
            tree = draft.joined(tree, ahead.tree) if fresh else ahead.tree
            q = (
                torch.cat([q, ahead.q])
                if fresh and q is not None and ahead.q is not None
                else ahead.q
            )
        self.verified += int(tree.valid.sum())
        targets, logprobs = self._verify(rows, read, tree, q, chain=config.topk <= 1)
        path, accepted = verify.walk(tree.tokens, tree.parents, tree.valid, targets)
        if self.budget is not None and tree.tokens.shape[1] > 1:
            on_path = np.zeros(tree.valid.shape, bool)
            np.put_along_axis(on_path, path, True, 1)
            drafted = tree.valid & (tree.depth > 0)
            self.budget.observe(tree.scores[drafted], on_path[drafted])
        committed = []
        for i, (row, count) in enumerate(zip(rows.tolist(), accepted.tolist(), strict=True)):
            taken = path[i, : count + 1]
            cache.commit(row, targets[i, taken], taken, tree.tokens.shape[1])
            committed.append(Committed(targets[i, taken], logprobs[i, taken], count))
        return committed

    def _draft(
        self, rows: np.ndarray, read: torch.Tensor, config: SpecConfig
    ) -> tuple[draft.Tree, torch.Tensor | None]:
        """Return the tree to verify and, under rejection, the drafter's probabilities q [B, num_steps, V]."""
        cache = self.cache
        model = self.model
        length = cache.length[rows]
        pending = cache.tokens[rows, length - 1]
        if config.off:
            return draft.roots(pending), None
        hidden = self._extend(rows, read)
        if config.num_steps == 0:
            return draft.roots(pending), None
        start = self._to(length)
        chain = config.topk == 1
        q: list[torch.Tensor] = []

        def expand(
            parents: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor, level: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            batch, expanded, nodes = ancestors.shape
            columns = start[:, None] + torch.arange(nodes - expanded, nodes, device=start.device)
            depth = torch.full_like(columns, level - 2)
            tree = None if chain else TreeColumns(start, ancestors, depth)
            plan = cache.plan(read, columns, drafter=True, tree=tree)
            out = model.draft(
                parents.reshape(batch * expanded, -1), tokens.reshape(-1), plan, cache.kv
            )
            return out.view(batch, expanded, -1), model.draft_logits(out).view(batch, expanded, -1)

        def sampled(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
            logp, sampling = self._logprobs(logits[:, 0], rows)
            support = verify.support(logp, *sampling)
            q.append(support if words is None else spread(support, words, model.arch.vocab))
            seeds = self._to(self.seeds[rows, verify.DRAFT])
            keys = self._to(self.draws[rows] + level - 1)
            token = verify.draw(support.log(), seeds, keys)[:, None]
            return logp.gather(1, token)[:, None], token[:, None]

        words = model.draft_ids
        pick: draft.Pick
        if self.verifier == "rejection":
            pick = sampled
        elif self.coupled:
            seeds = self._to(self.seeds[rows, 0])
            coupling = draft.Coupling(
                seeds, start - 1, *self._sampling(rows), words, self.sharpness
            )
            pick = draft.coupled(config.topk, coupling)
        else:
            pick = draft.likeliest(config.topk)
        if words is not None:
            pick = draft.among(words, pick)
        candidates = draft.grow(
            hidden, model.draft_logits(hidden), config.num_steps, config.topk, expand, pick
        )
        if chain and self.budget is None:
            keep = np.ones(candidates.tokens.shape, bool)
        else:
            scores = candidates.scores.float().cpu().numpy()
            limit = config.num_draft_tokens - 1
            context = int(length.sum())
            keep = (
                self.budget.keep(scores, candidates.depth, context, limit)
                if self.budget
                else top(scores, limit)
            )
        return draft.cut(pending, candidates, keep), torch.stack(q, 1) if q else None

    def _extend(self, rows: np.ndarray, read: torch.Tensor) -> torch.Tensor:
        """Run the drafter on all tokens it has not seen, up to the pending ones. Returns its last output [B, H]."""
        cache = self.cache
        chunk = self.prefill_chunk
        for row in {cache.prefix[row].key: row for row in rows}.values():  # a shared prefix once
            prefix = cache.prefix[row]
            one = np.array([row])
            while prefix.drafted < len(prefix.tokens):
                last = min(prefix.drafted + chunk, len(prefix.tokens))
                self._pairs(one, np.array([prefix.drafted]), np.array([last]))
                prefix.drafted = last
        while (behind := cache.length[rows] - cache.drafted[rows] > chunk).any():
            first = cache.drafted[rows[behind]]
            self._pairs(rows[behind], first, first + chunk)
            cache.drafted[rows[behind]] += chunk
        first = cache.drafted[rows]
        last = cache.length[rows]
        out = self._pairs(rows, first, last, read)
        cache.drafted[rows] = last
        return out[self._to(np.cumsum(last - first) - 1)]

    def _pairs(
        self,
        rows: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the drafter on the pairs (h of column c - 1, token of column c), c in [first, last). Returns [N, H]."""
        cache = self.cache
        if read is None:
            read = self._read(rows, last)
        columns, valid = _columns(first, last)
        plan = cache.plan(read, self._to(columns), drafter=True, valid=valid)
        tokens = self._to(cache.tokens[rows[:, None], columns][valid])
        before = self._to(cache.slots[rows[:, None], columns - 1][valid])
        return self.model.draft(cache.hidden.index_select(0, before), tokens, plan, cache.kv)

    def _verify(
        self,
        rows: np.ndarray,
        read: torch.Tensor,
        tree: draft.Tree,
        q: torch.Tensor | None,
        chain: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the target on the trees. Returns the token to commit at every node and its log-prob, both [B, T]."""
        cache = self.cache
        batch, nodes = tree.tokens.shape
        start = cache.length[rows] - 1
        where = None
        if not chain:
            where = TreeColumns(
                self._to(start), self._to(draft.ancestors(tree.parents)), self._to(tree.depth)
            )
        # padding stays within `read`
        columns = np.minimum(start[:, None] + np.arange(nodes), read.shape[1] - 1)
        plan = cache.plan(read, self._to(columns), valid=tree.valid, tree=where)
        hidden, drafted_from = self.model.target(self._to(tree.tokens[tree.valid]), plan, cache.kv)
        cache.hidden.index_copy_(0, plan.write, drafted_from)
        sample_of = np.nonzero(tree.valid)[0]  # the sample of each flat node
        logp, sampling = self._logprobs(self.model.logits(hidden), rows[sample_of])
        counter = self.draws[rows][:, None] + np.arange(nodes)
        if q is not None:
            coin_seeds = self._to(self.seeds[rows, verify.COIN])
            residual_seeds = self._to(self.seeds[rows, verify.RESIDUAL])
            p = verify.support(logp, *sampling).view(batch, nodes, -1)
            drafts = self._to(tree.tokens[:, 1:])
            chosen = verify.reject(
                drafts, q, p, coin_seeds, residual_seeds, self._to(counter)
            ).view(-1)
        else:
            keyed = self.verifier == "position_keyed"
            keys = start[:, None] + tree.depth if keyed else counter
            seeds = self._to(self.seeds[rows[sample_of], 0 if keyed else verify.TARGET])
            chosen = verify.sample(logp, *sampling, seeds, self._to(keys[tree.valid]))
        self.draws[rows] += nodes
        targets = np.full((batch, nodes), -1, np.int64)
        logprobs = np.zeros((batch, nodes), np.float32)
        targets[tree.valid] = chosen.cpu().numpy()
        logprobs[tree.valid] = (
            logp.gather(1, chosen.clamp(min=0)[:, None])[:, 0].float().cpu().numpy()
        )
        return targets, logprobs

    def _logprobs(self, logits: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, Knobs]:
        """Return log p [N, V] under the rows' temperatures, and what `_sampling` returns of the rows, [N] each."""
        sampling = self._sampling(rows)
        return verify.logprobs(logits, sampling[0]), sampling

    def _sampling(self, rows: np.ndarray) -> Knobs:
        """Return (temperature, top_p, top_k, min_p) of the rows, [B] each."""
        to = self._to
        return (
            to(self.temperature[rows]),
            to(self.top_p[rows]),
            to(self.top_k[rows]),
            to(self.min_p[rows]),
        )

    def _read(self, rows: np.ndarray, last: np.ndarray) -> torch.Tensor:
        return self._to(self.cache.slots[rows, : int(last.max())])

    def _to(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.model.device)


def spread(q: torch.Tensor, words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return probabilities `q [N, S]` of `words [S]` as `[N, vocab]`; columns of no word (-1) hold probability 0."""
    return q.new_zeros(len(q), vocab).index_add_(1, words.clamp(min=0), q)


def scratch(config: SpecConfig) -> int:
    """Return how many columns a round writes, from the pending token on: the larger of target and drafter nodes."""
    return max(config.num_draft_tokens, 1 + config.topk * max(config.num_steps - 1, 0))


def _columns(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return columns [first, last) of each row as a padded [B, T], and a mask [B, T] of those that are not padding."""
    columns = first[:, None] + np.arange(int((last - first).max()))
    return np.minimum(columns, last[:, None] - 1), columns < last[:, None]
