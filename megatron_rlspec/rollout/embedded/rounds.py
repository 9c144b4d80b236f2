"""Prefill and decode rounds over rows of the cache: draft, verify, commit. Requests are known to `engine.py` only."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from megatron_rlspec.rollout.embedded import draft, verify
from megatron_rlspec.rollout.embedded.cache import Cache, Prefix, TreeColumns
from megatron_rlspec.speculation.tree import top
from megatron_rlspec.types import OFF, Sampling, SpecConfig, Verifier


class Budget(Protocol):
    """Chooses which drafted candidates are verified; `speculation/tree.py` has two of them."""

    def keep(self, scores: np.ndarray, depth: np.ndarray, context_tokens: int, limit: int) -> np.ndarray:
        """Return the mask [B, M] of the candidates to verify: at most `limit` a row, each with its parents."""

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from verified nodes: their scores, and whether each was accepted, both [N]."""

    def timed(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        """Learn the ms of a whole round that sent `verified` tokens through the target."""


class Committed(NamedTuple):
    """What one round appended to one row."""

    tokens: np.ndarray  # [accepted + 1]
    logprobs: np.ndarray  # [accepted + 1]
    accepted: int


class RoundRunner:
    """Runs prefills and decode rounds, which advance rows of `cache` in place."""

    def __init__(self, cache: Cache, verifier: Verifier, budget: Budget | None, prefill_chunk: int) -> None:
        self.cache = cache
        self.model = cache.model
        self.verifier = verifier
        self.budget = budget
        self.prefill_chunk = prefill_chunk
        rows = len(cache.length)
        self.temperature = np.zeros(rows)
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, np.int64)
        self.seeds = np.zeros((rows, 5), np.int64)  # the request's own, then the streams of `verify`
        self.draws = np.zeros(rows, np.int64)  # noise keys used up by the verifiers that are not position-keyed
        self.verified = 0  # tokens that rounds have sent through the target so far

    def seat(self, row: int, sampling: Sampling, seed: int, draws: int) -> None:
        """Set how a row is sampled; `draws` continues the noise of a sample that was put back."""
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.seeds[row] = verify.streams(seed)
        self.draws[row] = draws

    def ready(self, row: int) -> bool:
        """Return whether all but the pending token of the row have been through the target."""
        prefix = self.cache.prefix[row]
        return prefix.computed == len(prefix.tokens) and self.cache.computed[row] == self.cache.length[row] - 1

    def prefill(self, rows: list[int]) -> None:
        """Run the target over at most `prefill_chunk` tokens that these rows still lack, shared prefixes once."""
        cache = self.cache
        room = self.prefill_chunk
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
            last = min(last, first + room)
            if first < last:
                spans.append((row, first, last, owner))
                room -= last - first
        if not spans:
            return
        which, starts, ends = (np.array(x) for x in zip(*(span[:3] for span in spans), strict=True))
        columns, valid = _columns(starts, ends)
        plan = cache.plan(self._read(which, ends), self._to(columns), valid=valid)
        tokens = self._to(cache.tokens[which[:, None], columns][valid])
        cache.hidden.index_copy_(0, plan.write, self.model.target(tokens, plan, cache.kv))
        for row, _, upto, owner in spans:
            if owner is not None:
                owner.computed = upto
            else:
                cache.computed[row] = upto

    def can_draft(self, rows: np.ndarray) -> np.ndarray:
        """Return [B], false before a row's second token, where there is no hidden state to draft from."""
        return self.cache.length[rows] > 1

    def columns(self, rows: np.ndarray, config: SpecConfig) -> np.ndarray:
        """Return [B], the columns that a round of `config` needs slots for."""
        return self.cache.length[rows] - 1 + scratch(config)

    def round(self, rows: np.ndarray, config: SpecConfig) -> list[Committed]:
        """Commit at least one token for every row; rows that cannot draft run without drafts in a pass of their own."""
        able = self.can_draft(rows)
        if config.off or able.all():
            return self._round(rows, config)
        committed: dict[int, Committed] = {}
        for part, chosen in ((able, config), (~able, OFF)):
            if part.any():
                committed |= zip(rows[part].tolist(), self._round(rows[part], chosen), strict=True)
        return [committed[row] for row in rows.tolist()]

    def _round(self, rows: np.ndarray, config: SpecConfig) -> list[Committed]:
        """Draft, verify and commit at least one token for every row."""
        cache = self.cache
        read = self._read(rows, cache.length[rows] - 1 + scratch(config))
        tree, q = self._draft(rows, read, config)
        self.verified += int(tree.valid.sum())
        targets, logprobs = self._verify(rows, read, tree, q, chain=config.topk <= 1)
        path, accepted = verify.walk(tree.tokens, tree.parents, tree.valid, targets)
        if self.budget is not None and tree.tokens.shape[1] > 1:
            hit = np.zeros(tree.valid.shape, bool)
            np.put_along_axis(hit, path, True, 1)
            drafted = tree.valid & (tree.depth > 0)
            self.budget.observe(tree.scores[drafted], hit[drafted])
        committed = []
        for i, (row, count) in enumerate(zip(rows.tolist(), accepted.tolist(), strict=True)):
            taken = path[i, : count + 1]
            cache.commit(row, targets[i, taken], taken, tree.tokens.shape[1])
            committed.append(Committed(targets[i, taken], logprobs[i, taken], count))
        return committed

    def _draft(
        self, rows: np.ndarray, read: torch.Tensor, config: SpecConfig
    ) -> tuple[draft.Tree, torch.Tensor | None]:
        """The tree to verify and, under rejection, what the drafts were drawn from: q [B, num_steps, V]."""
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
            b, c, nodes = ancestors.shape
            columns = start[:, None] + torch.arange(nodes - c, nodes, device=start.device)
            depth = torch.full_like(columns, level - 2)
            tree = None if chain else TreeColumns(start, ancestors, depth)
            plan = cache.plan(read, columns, drafter=True, tree=tree)
            out = model.draft(parents.reshape(b * c, -1), tokens.reshape(-1), plan, cache.kv[-1])
            return out.view(b, c, -1), model.logits(out).view(b, c, -1)

        def sampled(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
            logp, knobs = self._logprobs(logits[:, 0], rows)
            q.append(verify.support(logp, *knobs))
            seeds = self._to(self.seeds[rows, verify.DRAFT])
            keys = self._to(self.draws[rows] + level - 1)
            token = verify.draw(q[-1].log(), seeds, keys)[:, None]
            return logp.gather(1, token)[:, None], token[:, None]

        pick = sampled if self.verifier == "rejection" else draft.likeliest(config.topk)
        candidates = draft.grow(hidden, model.logits(hidden), config.num_steps, config.topk, expand, pick)
        if chain and self.budget is None:
            keep = np.ones(candidates.tokens.shape, bool)
        else:
            scores = candidates.scores.float().cpu().numpy()
            limit = config.num_draft_tokens - 1
            context = int(length.sum())
            keep = self.budget.keep(scores, candidates.depth, context, limit) if self.budget else top(scores, limit)
        return draft.cut(pending, candidates, keep), torch.stack(q, 1) if q else None

    def _extend(self, rows: np.ndarray, read: torch.Tensor) -> torch.Tensor:
        """Fill the drafter's cache up to the pending tokens, over any gap. Returns its output [B, H] there."""
        cache = self.cache
        chunk = self.prefill_chunk
        for row in {cache.prefix[row].key: row for row in rows}.values():  # a shared prefix once
            prefix = cache.prefix[row]
            one = np.array([row])
            while prefix.drafted < len(prefix.tokens):
                last = min(prefix.drafted + chunk, len(prefix.tokens))
                self._pairs(one, np.array([prefix.drafted]), np.array([last]))
                prefix.drafted = last
        while (long := cache.length[rows] - cache.drafted[rows] > chunk).any():
            first = cache.drafted[rows[long]]
            self._pairs(rows[long], first, first + chunk)
            cache.drafted[rows[long]] += chunk
        first = cache.drafted[rows]
        last = cache.length[rows]
        out = self._pairs(rows, first, last, read)
        cache.drafted[rows] = last
        return out[self._to(np.cumsum(last - first) - 1)]

    def _pairs(
        self, rows: np.ndarray, first: np.ndarray, last: np.ndarray, read: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the drafter over the pairs (h of column c - 1, token of column c), c in [first, last). Returns [N, H]."""
        cache = self.cache
        columns, valid = _columns(first, last)
        plan = cache.plan(
            self._read(rows, last) if read is None else read, self._to(columns), drafter=True, valid=valid
        )
        tokens = self._to(cache.tokens[rows[:, None], columns][valid])
        before = self._to(cache.slots[rows[:, None], columns - 1][valid])
        return self.model.draft(cache.hidden.index_select(0, before), tokens, plan, cache.kv[-1])

    def _verify(
        self, rows: np.ndarray, read: torch.Tensor, tree: draft.Tree, q: torch.Tensor | None, chain: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the target over the trees. Returns the token to commit at every node and its log-prob, both [B, T]."""
        cache = self.cache
        b, t = tree.tokens.shape
        start = cache.length[rows] - 1
        where = None
        if not chain:
            where = TreeColumns(self._to(start), self._to(draft.ancestors(tree.parents)), self._to(tree.depth))
        plan = cache.plan(read, self._to(start[:, None] + np.arange(t)), valid=tree.valid, tree=where)
        hidden = self.model.target(self._to(tree.tokens[tree.valid]), plan, cache.kv)
        cache.hidden.index_copy_(0, plan.write, hidden)
        of = np.nonzero(tree.valid)[0]  # the sample of each flat node
        logp, knobs = self._logprobs(self.model.logits(hidden), rows[of])
        counter = self.draws[rows][:, None] + np.arange(t)
        if q is not None:
            coins, rest = (self._to(self.seeds[rows, which]) for which in (verify.COIN, verify.RESIDUAL))
            p = verify.support(logp, *knobs).view(b, t, -1)
            chosen = verify.reject(self._to(tree.tokens[:, 1:]), q, p, coins, rest, self._to(counter)).view(-1)
        else:
            keyed = self.verifier == "position_keyed"
            keys = start[:, None] + tree.depth if keyed else counter
            seeds = self._to(self.seeds[rows[of], 0 if keyed else verify.TARGET])
            temperature, top_p, top_k = knobs
            chosen = verify.sample(logp, temperature, top_p, top_k, seeds, self._to(keys[tree.valid]))
        self.draws[rows] += t
        targets = np.full((b, t), -1, np.int64)
        logprobs = np.zeros((b, t), np.float32)
        targets[tree.valid] = chosen.cpu().numpy()
        logprobs[tree.valid] = logp.gather(1, chosen.clamp(min=0)[:, None])[:, 0].float().cpu().numpy()
        return targets, logprobs

    def _logprobs(self, logits: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """log p [N, V] under the rows' temperatures, and (temperature, top_p, top_k) [N] of the rows."""
        knobs = tuple(self._to(x[rows]) for x in (self.temperature, self.top_p, self.top_k))
        return verify.logprobs(logits, knobs[0]), knobs

    def _read(self, rows: np.ndarray, last: np.ndarray) -> torch.Tensor:
        return self._to(self.cache.slots[rows, : int(last.max())])

    def _to(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.model.device)


def scratch(config: SpecConfig) -> int:
    """Return the columns that a round writes from the pending token on: the larger of target and drafter nodes."""
    return max(config.num_draft_tokens, 1 + config.topk * max(config.num_steps - 1, 0))


def _columns(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns [first, last) of each row as a padded [B, T], and which of them are real."""
    columns = first[:, None] + np.arange(int((last - first).max()))
    return np.minimum(columns, last[:, None] - 1), columns < last[:, None]
