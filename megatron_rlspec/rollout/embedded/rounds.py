"""Prefill and decode rounds over rows of the cache: draft, verify, commit.

This file knows rows of the cache, and no requests: `scheduler.py` gives rows to requests, and `engine.py` calls
`prefill` and `round` and appends the tokens.

B: rows of a round; k: drafts of a row; N: tokens of one pass. The N tokens are those of all rows without padding, row
after row: `array[valid]` here and `ForwardPlan.padded_index` in `cache.plan` select the same tokens in the same order.

`cache.py` says what slots, columns, pending tokens and the drafter's pairs are.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.rollout.embedded import draft, verify
from megatron_rlspec.rollout.embedded.cache import Cache, Prefix
from megatron_rlspec.rollout.embedded.draft import Chains
from megatron_rlspec.rollout.embedded.verify import Committed, Settings
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import SHARPNESS, Drafts, Sampling, SpecConfig, Verifier


class Span(NamedTuple):
    """Columns [first, last) of a row that a prefill runs on.

    prefix  the shared prefix that these columns belong to; None: they are the row's own
    """

    row: int
    first: int
    last: int
    prefix: Prefix | None


class RoundRunner:
    """Runs prefills and decode rounds, which advance rows of `cache` in place. The caller holds the engine's lock.

    Under tensor parallelism `prefill` and `round` are collective: all ranks must call them with the same rows.

    Raises ValueError for an unknown verifier.

    prefill_chunk  most tokens of one prefill, and most tokens of a row that the drafter reads in one pass
    sharpness      of coupled drafts (`types.SHARPNESS`)
    coupled        whether drafts take the verifier's noise: `drafts` is "coupled" and the verifier position_keyed
    selection      the rule, if it chooses how many drafts of each row the target verifies; None: it verifies all
    settings       [rows, 4] float64, the sampling of each row, in the order of `verify.Settings`
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
        self.prefill_chunk = prefill_chunk
        rows = cache.rows
        self.settings = np.zeros((rows, len(Settings._fields)))
        self.seeds = np.zeros(rows, np.int64)  # of the noise
        # Noise keys that the row's sample has used so far. Only target_only reads it. `Scheduler.vacate` stores it.
        self.draws = np.zeros(rows, np.int64)
        # committed tokens at the start of the row's last round; only `missed` reads it
        self.previous_length = np.zeros(rows, np.int64)

    def seat(self, row: int, sampling: Sampling, seed: int, draws: int) -> None:
        """Set the sampling of a row that `Cache.open` has given to a sample, before its first round.

        draws  noise keys that the sample has used so far: it continues after them. 0 for a new sample
        """
        self.settings[row] = [getattr(sampling, name) for name in Settings._fields]
        self.seeds[row] = verify.noise_seed(seed, self.verifier)
        self.draws[row] = draws
        # as if the last round had committed one token, so that `missed` counts all tokens but the pending one
        self.previous_length[row] = self.cache.length[row] - 1

    def ready(self, row: int) -> bool:
        """Return whether the target has run on all tokens of the row but the pending one, so that a round can run."""
        prefix = self.cache.prefix[row]
        return (
            prefix.computed == len(prefix.tokens)
            and self.cache.computed[row] == self.cache.length[row] - 1
        )

    def prefill(self, rows: list[int]) -> None:
        """Run the target on at most `prefill_chunk` tokens of these rows that it has not seen yet, in their order.

        The pending tokens are left to the rounds. A shared prefix runs once. Without such tokens this does nothing.
        The rows must have slots for all their tokens, as `Scheduler.admit` gives them.
        """
        cache = self.cache
        spans = self._prefill_spans(rows)
        if not spans:
            return
        span_rows = np.array([span.row for span in spans])
        starts = np.array([span.first for span in spans])
        ends = np.array([span.last for span in spans])
        columns, valid = _columns(starts, ends)
        read = self._slots_of(span_rows, ends)
        plan = cache.plan(read, self._to_device(columns), valid=valid)
        tokens = cache.tokens[span_rows[:, None], columns]
        _, drafted_from = self.model.target(self._to_device(tokens[valid]), plan, cache.kv)
        cache.hidden.index_copy_(0, plan.write, drafted_from)
        # only after the pass: if it fails, these columns do not count as computed
        for span in spans:
            if span.prefix is not None:
                span.prefix.computed = span.last
            else:
                cache.computed[span.row] = span.last

    def _prefill_spans(self, rows: list[int]) -> list[Span]:
        """Return the columns that the next prefill runs on, in the order of rows."""
        cache = self.cache
        budget = self.prefill_chunk
        spans = []
        prefixes = set()  # keys of the unfinished prefixes that have a span, or had no budget left
        for row in rows:
            prefix = cache.prefix[row]
            if prefix.computed < len(prefix.tokens):
                # The first row with this prefix computes it for all. The rows' own columns follow in a later prefill.
                if prefix.key in prefixes:
                    continue
                prefixes.add(prefix.key)
                span = Span(row, prefix.computed, len(prefix.tokens), prefix)
            else:
                pending = int(cache.length[row]) - 1
                span = Span(row, int(cache.computed[row]), pending, None)
            last = min(span.last, span.first + budget)
            if span.first < last:
                spans.append(span._replace(last=last))
                budget -= last - span.first
        return spans

    def can_draft(self, row: int) -> bool:
        """Return whether a row has at least two tokens.

        The drafter reads pairs of a token and the hidden state of the token before it; a single token has no pair.
        """
        return bool(self.cache.length[row] > 1)

    def missed(self, rows: np.ndarray) -> int:
        """Return how many tokens the drafter must run on beyond those that the rows' last round committed.

        These are prompts, and tokens of rounds in which the drafter was off. The rows must be different ones; a prefix
        that several rows share counts once, as `_catch_up` runs it.
        """
        behind = self.previous_length[rows] - self.cache.drafted[rows]
        missed = int(np.maximum(behind, 0).sum())
        for _, prefix in self._prefixes(rows):
            missed += len(prefix.tokens) - prefix.drafted
        return missed

    def _prefixes(self, rows: np.ndarray) -> list[tuple[int, Prefix]]:
        """Return the distinct prefixes of rows, each with a row that has it: its slots show where the prefix lies."""
        prefixes = {}
        for row in rows.tolist():
            prefix = self.cache.prefix[row]
            prefixes[prefix.key] = (row, prefix)
        return list(prefixes.values())

    def columns(self, rows: np.ndarray, config: SpecConfig) -> np.ndarray:
        """Return [B] int64, how many columns of each row need slots in a round of `config`.

        These are the committed tokens, of which the last is pending, and the drafts.
        """
        return self.cache.length[rows] + config.num_steps

    def round(self, rows: np.ndarray, config: SpecConfig) -> Committed:
        """Draft, verify and commit at least one token for every row.

        rows    [B], different ones, all `ready`; all `can_draft`, unless `config` is off. Their `columns` have slots
                (`Scheduler.make_room`)
        config  how many tokens are drafted
        """
        cache = self.cache
        self.previous_length[rows] = cache.length[rows]  # before `commit`, which moves `length`
        read = self._slots_of(rows, self.columns(rows, config))
        chains = self._draft(rows, read, config)
        targets, logprobs = self._verify(rows, read, chains)
        accepted = verify.count_accepted(chains.tokens, chains.valid, targets)
        cache.commit(rows, targets, accepted)
        return Committed(targets, logprobs, accepted, chains.drafts, chains.logq)

    def _draft(self, rows: np.ndarray, read: Tensor, config: SpecConfig) -> Chains:
        """Run the drafter on the tokens that it has not read, and draft a chain for each row.

        If `config` is off, the drafter does not run, and the chains have the pending tokens only.
        """
        pending = self.cache.length[rows] - 1
        tokens = self.cache.tokens[rows, pending][:, None]
        drafts = np.full(len(rows), config.num_steps)
        if config.off:
            return Chains(tokens, drafts)
        hidden = self._catch_up(rows, read)
        if config.num_steps == 0:  # `SpecConfig(0)`: the drafter keeps up without drafting
            return Chains(tokens, drafts)
        drafted, log_probs = self._chain(rows, read, hidden, config.num_steps)
        logq = None
        if self.selection is not None:
            logq = log_probs.float().cpu().numpy()
            drafts = self.selection.lengths(logq)
            # Drop the depths at which no row has a draft that is verified. `logq` keeps them: the rule learns from all.
            drafted = drafted[:, : drafts.max()]
        return Chains(np.concatenate([tokens, drafted.cpu().numpy()], 1), drafts, logq)

    def _chain(
        self, rows: np.ndarray, read: Tensor, hidden: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Draft `steps` tokens of each row, from the drafter's output `hidden [B, H]` at the pending tokens.

        Returns (tokens int64, log q), [B, steps] each, on the model's device.

        The passes write keys of drafts into the drafter's cache. `Cache.drafted` does not count them, so the next
        `_catch_up` replaces them by those of the committed tokens and the target's hidden states.
        """
        cache = self.cache
        model = self.model
        start = self._to_device(cache.length[rows])
        seeds = self._to_device(self.seeds[rows])
        settings = self._settings(rows)
        words = model.draft_ids
        tokens: list[Tensor] = []
        logqs: list[Tensor] = []
        for step in range(steps):
            # The column before the draft. Its position keys the noise, as in `_verify`: with another key, drafts would
            # be accepted less often.
            predicting = start + step - 1
            if tokens:  # at the first step `hidden` is known already
                plan = cache.plan(read, predicting[:, None], drafter=True)
                hidden = model.draft(hidden, tokens[-1], plan, cache.kv)
            logits = model.draft_logits(hidden)
            if self.coupled:
                logq, token = draft.coupled(
                    logits, settings, seeds, predicting, words, self.sharpness
                )
            else:
                logq, token = draft.likeliest(logits)
            if words is not None:
                token = words[token]  # from the draft head's column to the token id
            tokens.append(token)
            logqs.append(logq)
        return torch.stack(tokens, 1), torch.stack(logqs, 1)

    def _catch_up(self, rows: np.ndarray, read: Tensor) -> Tensor:
        """Run the drafter on all tokens it has not seen, the pending ones included.

        Returns its output [B, H] at each row's pending token.
        """
        cache = self.cache
        # Prefixes and rows that are far behind run in chunks first, which bounds the memory of a pass. Prefixes come
        # before rows, whose pairs attend to the prefix's keys.
        chunk = self.prefill_chunk
        for row, prefix in self._prefixes(rows):
            while prefix.drafted < len(prefix.tokens):
                last = min(prefix.drafted + chunk, len(prefix.tokens))
                self._run_pairs(np.array([row]), np.array([prefix.drafted]), np.array([last]))
                prefix.drafted = last
        while (behind := cache.length[rows] - cache.drafted[rows] > chunk).any():
            first = cache.drafted[rows[behind]]
            self._run_pairs(rows[behind], first, first + chunk)
            cache.drafted[rows[behind]] += chunk
        first = cache.drafted[rows]
        last = cache.length[rows]
        out = self._run_pairs(rows, first, last, read)
        cache.drafted[rows] = last
        # `out` has the rows' pairs one after another. Every row has at least one pair in it: its pending token was
        # committed after the drafter's last pass.
        ends = np.cumsum(last - first)
        return out[self._to_device(ends - 1)]  # the output at each row's pending token

    def _run_pairs(
        self,
        rows: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        read: Tensor | None = None,
    ) -> Tensor:
        """Run the drafter on the pairs (h of column c - 1, token of column c), c in [first, last). Returns [N, H].

        first, last  [B], columns of each row; `first` is at least 1
        read         slots [B, L] of the rows, L at least the largest `last`; None: they are looked up
        """
        cache = self.cache
        if read is None:
            read = self._slots_of(rows, last)
        columns, valid = _columns(first, last)
        plan = cache.plan(read, self._to_device(columns), drafter=True, valid=valid)
        tokens = cache.tokens[rows[:, None], columns]
        previous_slots = cache.slots[rows[:, None], columns - 1]
        hidden = cache.hidden.index_select(0, self._to_device(previous_slots[valid]))
        return self.model.draft(hidden, self._to_device(tokens[valid]), plan, cache.kv)

    def _verify(
        self, rows: np.ndarray, read: Tensor, chains: Chains
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the target on the chains, and sample its own token behind each token of a chain.

        Returns (tokens int64, log-probs float32), [B, 1 + k] each; -1 and 0 on padding. Log-probs are those of the
        request's temperature before top-k, top-p and min-p.
        """
        valid = chains.valid
        logits = self._target_logits(rows, read, chains)
        token_rows = rows[np.nonzero(valid)[0]]  # [N], the row of each token that is verified
        settings = self._settings(token_rows)
        logp = verify.logprobs(logits, settings.temperature)
        # Under position_keyed, the key of a token's noise is the position before it. Under target_only every round
        # takes `width` new keys, also for drafts that are refused, so that no noise is used twice.
        first = self.draws[rows]
        if self.verifier == "position_keyed":
            first = self.cache.length[rows] - 1
        width = valid.shape[1]
        keys = first[:, None] + np.arange(width)
        self.draws[rows] += width
        seeds = self._to_device(self.seeds[token_rows])
        chosen = verify.sample(logp, settings, seeds, self._to_device(keys[valid]))
        targets = np.full(valid.shape, -1, np.int64)
        logprobs = np.zeros(valid.shape, np.float32)
        targets[valid] = chosen.cpu().numpy()
        chosen_logp = logp.gather(1, chosen[:, None])[:, 0]
        logprobs[valid] = chosen_logp.float().cpu().numpy()
        return targets, logprobs

    def _target_logits(self, rows: np.ndarray, read: Tensor, chains: Chains) -> Tensor:
        """Run the target on the chains, and store what the drafter reads. Returns logits [N, V], without padding.

        The pass writes keys and hidden states of refused drafts, too: a later pass overwrites them.
        """
        cache = self.cache
        valid = chains.valid
        pending = cache.length[rows] - 1
        columns = pending[:, None] + np.arange(valid.shape[1])
        columns = np.minimum(columns, read.shape[1] - 1)  # padding stays within `read`
        plan = cache.plan(read, self._to_device(columns), valid=valid)
        hidden, drafted_from = self.model.target(
            self._to_device(chains.tokens[valid]), plan, cache.kv
        )
        cache.hidden.index_copy_(0, plan.write, drafted_from)
        return self.model.logits(hidden)

    def _settings(self, rows: np.ndarray) -> Settings:
        """Return how the rows are sampled, [B] each, for any number B of rows, which may repeat."""
        return Settings(*self._to_device(self.settings[rows].T))

    def _slots_of(self, rows: np.ndarray, last: np.ndarray) -> Tensor:
        """Return the slots [B, L] of the rows' columns before the largest `last`.

        A column without a slot shows an old one or 0: the causal mask hides it.
        """
        return self._to_device(self.cache.slots[rows, : int(last.max())])

    def _to_device(self, x: np.ndarray) -> Tensor:
        """Copy an array to the model's device.

        On a CPU the tensor may share the array's memory: change neither in place while the other is in use.
        """
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.model.device)


def _columns(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return columns [first, last) of each row as a padded [B, T], and a mask [B, T] of those that are not padding.

    Padding repeats the row's last column, so that it is a valid index.
    """
    longest = int((last - first).max())
    columns = first[:, None] + np.arange(longest)
    end = last[:, None]
    return np.minimum(columns, end - 1), columns < end
