"""Run a round without drafts as an engine without speculation does: one decode pass of the target, nothing else.

SGLang's step 0 takes the verify path, with a tree of one node for each request. With CUDA graphs that pass is captured,
and its host work overlaps the device: there `possible` is False, and rounds stay on SGLang's verify path. Without
graphs the verify path costs an extra read of the KV cache per layer and the walk over the tree.

`controller.py` asks `possible` and `needs_no_verify_path` first, and calls `run` only if both are True.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.scheduler.verifier import only_tokens


def possible(worker: Any) -> bool:
    """Return whether `run` can take the place of the verify path in a decode round of an `EAGLEWorkerV2`.

    It cannot with CUDA graphs: the next pass overwrites their output buffers, and `DrafterGap` keeps the hidden states
    without a copy.
    """
    return worker.target_worker.model_runner.decode_cuda_graph_runner is None


def needs_no_verify_path(batch: Any) -> bool:
    """Return whether a batch needs nothing that only the verify path computes, such as grammars and top log-probs."""
    return (
        not batch.has_grammar
        and batch.hisparse_coordinator is None
        and batch.mamba_track_indices is None
        and only_tokens(batch.top_logprobs_nums, batch.token_ids_logprobs)
        and batch.spec_info is not None
        and not batch.spec_info.is_verify_input()
    )


def penalised(batch: Any) -> bool:
    """Return whether some request of the batch has a penalty, which depends on its earlier tokens.

    SGLang counts one token a round for penalties. So a round with drafts would give another text than one without.
    SGLang sets this tensor for every kind of penalty, also for those that scale.
    """
    return batch.sampling_info.acc_additive_penalties is not None


def run(worker: Any, batch: Any, on_publish: Any = None) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Run the round. Returns (result, hidden states [B, H], tokens [B]): h_t and x_t of the position that was computed.

    The result is a `GenerationBatchResult` with the fields that the verify path would set. Of its `next_draft_input`
    only `bonus_tokens` is set: `controller.py` fills the rest by `_stub_skipped_draft_extend`. The caller must give
    hidden states and tokens to `DrafterGap.record`, because the drafter does not read them. `batch` is not changed.

    worker      `EAGLEWorkerV2`
    batch       `ScheduleBatch` in decode mode, without a verify input
    on_publish  SGLang's callback under the overlap scheduler; it gets the new sequence lengths [B]
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    # each request's newest token, which is not in the KV cache yet
    tokens = batch.spec_info.bonus_tokens
    # A shallow copy: the scheduler's batch must not change.
    decode_batch = object.__new__(type(batch))
    vars(decode_batch).update(vars(batch))
    decode_batch.forward_mode = ForwardMode.DECODE
    decode_batch.spec_info = None
    decode_batch.input_ids = tokens.to(torch.int64)
    # SGLang has reserved slots behind each sequence; the first one is for this token.
    decode_batch.out_cache_loc = worker.req_to_token_pool.req_to_token[
        batch.req_pool_indices, batch.seq_lens
    ].to(torch.int64)
    decode_batch.seq_lens = batch.seq_lens + 1
    decode_batch.seq_lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + 1
    decode_batch.orig_seq_lens = batch.orig_seq_lens + 1
    decode_batch.seq_lens_sum = None  # SGLang computes the sum of the new lengths
    result = versions.installed().forward(
        worker.target_worker, decode_batch, CaptureHiddenMode.FULL
    )

    hidden = result.logits_output.hidden_states
    # Log-probs are [B] from plain decoding; SGLang expects [B, 1] here, as from the verify path.
    if batch.return_logprob:
        result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs.view(
            -1, 1
        )
    result.next_token_ids = result.next_token_ids.to(torch.int32)
    result.speculative_num_draft_tokens = 1
    result.accept_lens = torch.ones_like(result.next_token_ids)
    result.new_seq_lens = decode_batch.seq_lens
    result.next_draft_input = EagleDraftInput(bonus_tokens=result.next_token_ids)
    # Last: the scheduler may go on with these lengths from here.
    if on_publish is not None:
        on_publish(result.new_seq_lens)
    return result, hidden, tokens
