"""Decide before every decode round, in place of SGLang's adaptive controller, and run rounds without drafter passes.

This file imports SGLang, so only `http/plugin.py` imports it, in SGLang's own processes. Do not import the base class
by name: when SGLang's hooks replace a class, they rebind every module-level name of it, also one in this file.

What a round runs is decided in `decisions.py`; this file carries the decision out. SGLang calls the controller when it
launches a round. The overlap scheduler launches a round before it processes the results of the round before. So request
lengths (`Req.seqlen`) lag by one round, and the rule observes a round one launch late.

    commands (control.py) ─► decider: fixed, or a SpecRule ◄───────────────────────────────┐
                                        │ config                                           │ accepted drafts
    batch ─► _round ─► _decide ◄────────┘                                                  │
                │         └─► gap.close: drafters that missed tokens read them             │
                ├─ off ──► plain_round.run: the target alone; gap.record(hidden, tokens) ──┤
                └─ draft ► SGLang: draft (coupled.py) ─► verify (verifier.py) ─► extend ───┤
                                                                                           │
    tokens to clients ◄─ SGLang ◄─ control._after_decode(result.rlspec_round) ◄────────────┴──► RoundLog ─► `stats`

With CUDA graphs, or if a request needs the verify path, an off round runs through SGLang, too, with no drafts. Then
`_extend_unless_off` skips the drafter.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative import adaptive_runtime_state

from megatron_rlspec.rollout.sglang.scheduler import decisions, plain_round, ragged, versions
from megatron_rlspec.rollout.sglang.scheduler.decisions import DecodeRound
from megatron_rlspec.rollout.sglang.scheduler.drafter_gap import DrafterGap
from megatron_rlspec.rollout.sglang.scheduler.rounds import rounds
from megatron_rlspec.types import OFF, SpecConfig

logger = logging.getLogger(__name__)


def _none_missed(_: int) -> int:
    """Return 0: stands for `DrafterGap.missed` while no drafter is behind."""
    return 0


class DraftController(adaptive_runtime_state.AdaptiveController):
    """SGLang's AdaptiveController with our decision. SGLang's rule still lists the candidates and sizes the graphs.

    It wraps `forward_batch_generation` of its `EAGLEWorkerV2`, and `_draft_extend_for_decode` of that worker's
    `EagleDraftWorker`. `CoupledDrafts` wraps the second one earlier, so the call goes through this class first. The
    scheduler's thread calls all methods.
    """

    def __init__(self, worker: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(worker, *args, **kwargs)  # `args`: SGLang's rule or its file, by version
        ragged.present.runner = worker.target_worker.model_runner
        decisions.decider.start(
            self.candidate_steps,
            worker.target_worker.model_config.hf_text_config.to_dict(),
            worker.server_args.tp_size,
        )
        self.gap = DrafterGap(worker)
        # The round that is being launched; `_round` sets `_batch`, and `_decide` sets the others:
        self._batch: Any = None  # SGLang's `ScheduleBatch`
        self._config = SpecConfig(worker.speculative_num_steps)
        # indices of the requests whose drafter has caught up; None: all, or a round of `OFF`
        self._drafting: list[int] | None = None
        self._caught_up = 0.0  # seconds that catching up took
        self._context = 0  # tokens of all requests of the round
        self._plain = False  # whether no request of the round needs the verify path
        # whether `_round` has decided the round, so that `activate_step_by_batch` must not decide again
        self._decided = False
        # SGLang's own methods (or those of `CoupledDrafts`); ours take their place
        self._forward = worker.forward_batch_generation
        worker.forward_batch_generation = self._round
        self._extend = worker.draft_worker._draft_extend_for_decode
        worker.draft_worker._draft_extend_for_decode = self._extend_unless_off

    def init_states(self, *args: Any, **kwargs: Any) -> None:
        """Build the runtime state and graphs of every step count, then tell the decider what these allow."""
        super().init_states(*args, **kwargs)
        # Only now does the target's `ModelRunner` have its attention, which `why_unsupported` reads.
        if not decisions.decider.why_even:
            decisions.decider.why_even = ragged.why_unsupported(ragged.present.runner)
            if decisions.decider.why_even:
                logger.warning("rlspec: rounds are even: %s", decisions.decider.why_even)
        sglang = versions.installed()
        captured = {steps: sglang.captured(self, steps) for steps in self.candidate_steps}
        decisions.decider.limit(captured, self.worker.speculative_num_steps)

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Decide, unless `_round` has decided already. SGLang calls it once in each decode round, inside `_forward`.

        `_round` leaves batches without requests to it.
        """
        if not self._decided:
            self._decide(batch_size)
        self._decided = False

    def _decide(self, batch_size: int) -> None:
        """Choose the round's configuration, let drafters catch up for it, and put SGLang's state for it in place.

        Call it once for each round: the rule counts calls. Collective over the tensor-parallel ranks, because catching
        up runs passes of the drafter.
        """
        reqs = self._batch.reqs
        gap = self.gap
        self._caught_up = 0.0
        if reqs:  # Without requests the configuration stays, and so do the fields that the last round left.
            self._context = sum(r.seqlen for r in reqs)
            self._plain = plain_round.needs_no_verify_path(self._batch)
            missed = partial(gap.missed, reqs) if gap.open else _none_missed
            # Drafts would change the text of a penalised request.
            if decisions.decider.can_hold and plain_round.penalised(self._batch):
                self._config, n = OFF, 0
            else:
                self._config, n = decisions.decider.choose(batch_size, self._context, missed)
            # A round in which the drafter runs needs drafters that have read what they missed.
            closing = gap.open and not self._config.off
            self._drafting = self._catch_up(n) if closing else None
        # After catching up, and before SGLang makes the round's tensors: they have the shapes of this step count. `OFF`
        # has step count 0.
        if self._config.num_steps != self.worker.speculative_num_steps:
            self._activate(self._config.num_steps)
        self._begin_ragged(batch_size)

    def _begin_ragged(self, batch_size: int) -> None:
        """Tell `ragged.present` how many drafts the round verifies.

        The round verifies all of them if a drafter has not caught up: random drafts have no q to choose by. Call it
        before every round, also before one that verifies all drafts: otherwise `ragged.present` would keep the nodes of
        the round before.
        """
        rule = decisions.decider.ragged_rule
        drafting = self._config.num_steps > 0 and self._drafting is None
        if not (rule and drafting and self._plain and ragged.can_sample_packed(self._batch)):
            ragged.present.begin_even()
            return
        assert rule.selection is not None
        most = batch_size * self._config.num_steps
        ragged.present.begin(rule.drafts(batch_size), most, rule.selection, self._batch)

    def _catch_up(self, n: int) -> list[int] | None:
        """Let the drafters of the n requests that are least behind read what they missed, and note how long it took.

        Returns the new `_drafting`: the indices of these requests, or None if they are all. Collective over the
        tensor-parallel ranks: all must call it with the same n.
        """
        device = self._batch.seq_lens.device
        # Wait for the round before, so that its time does not count as time of catching up.
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        began = time.perf_counter()
        drafting = self.gap.close(self._batch, n)
        self._caught_up = time.perf_counter() - began
        rounds.catching_up(self._caught_up)
        return drafting

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Pass the accepted drafts of each request to SGLang's rule if that rule decides.

        SGLang calls it when it processes a round's results. The step count that its rule returns is not used here:
        `Decider.choose` asks the rule before the next round. Our own rule observes rounds in `control.py`, with the
        configuration that each of them ran: under the overlap scheduler `_config` may be that of a later round.
        """
        if decisions.decider.stock and not decisions.decider.why_held:
            decisions.decider.stock.on_verify_complete(num_correct_drafts_per_req, batch_size)

    def _round(self, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Wrap the worker's `forward_batch_generation`: a prefill, or one decode round that is decided here.

        `on_publish` is SGLang's callback under the overlap scheduler, which gets the new sequence lengths.
        """
        self._batch = batch
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or not batch.reqs:
            if self.gap.open:  # In SGLang's prefill the drafter reads all tokens of these requests.
                self.gap.mark_read(batch.reqs)
            return self._forward(batch, on_publish, *args, **kwargs)
        # SGLang asks for a decision in the middle of `_forward`. A plain round does not call `_forward`, so decide now.
        self._decide(len(batch.reqs))
        if self._config.off and self._plain and plain_round.possible(self.worker):
            result, hidden, tokens = plain_round.run(self.worker, batch, on_publish)
            self._skip_drafter(batch, result, hidden, tokens)
        else:
            self._decided = True
            result = self._forward(batch, on_publish, *args, **kwargs)
        # read by `control._after_decode` when the results are processed
        result.rlspec_round = DecodeRound(
            self._config, self._context, self._drafting, self._caught_up, *self._ragged_choice()
        )
        return result

    def _ragged_choice(self) -> tuple[Any, Any]:
        """Return log q [B, k] of the drafts and the verified drafts [B]; (None, None) if all were verified.

        Both are on the host. The copies are only begun here, and have ended when SGLang processes the round's results.
        """
        chosen = ragged.present.chosen
        if chosen is None:
            return None, None
        from sglang.srt.utils.common import async_d2h

        return async_d2h(chosen.logq), async_d2h(chosen.lengths)

    def _extend_unless_off(self, batch: Any, result: Any, **kwargs: Any) -> None:
        """Wrap the drafter's pass over the tokens that the verify path computed, and keep what a drafter misses.

        In a round of `OFF` the drafter's pass is skipped.
        """
        if self._config.off or self._drafting is not None:
            # Copies, because CUDA graphs write their outputs into the same buffers in every round.
            hidden = result.logits_output.hidden_states.clone()
            tokens = batch.spec_info.draft_token.clone()
            if self._config.off:
                self._skip_drafter(batch, result, hidden, tokens)
                return
            # The pass below runs for requests outside `_drafting`, too, but on a KV cache with a gap: their drafters
            # must read these tokens again.
            self.gap.record(
                batch.reqs, hidden, tokens, result.accept_lens.clone(), self._drafting or ()
            )
        self._extend(batch, result, **kwargs)

    def _skip_drafter(self, batch: Any, result: Any, hidden: Any, tokens: Any) -> None:
        """Keep the drafter's inputs of a round of `OFF`, and fill what its pass would have put into the result.

        hidden, tokens  of the target's pass over one position of each request: [B, H] and [B]
        """
        self.gap.record(batch.reqs, hidden, tokens)
        # SGLang passes the drafter's output on to the next round, so tensors of its shape must be there.
        self.worker._stub_skipped_draft_extend(batch, result)
