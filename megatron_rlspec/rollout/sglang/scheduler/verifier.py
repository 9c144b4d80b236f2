"""Verify drafts by sampling: at every position the target's token is the one that plain decoding would sample.

Two verifiers (docs/losslessness.md):

- `position_keyed`: a token is the argmax of log p + Gumbel(hash(seed, position, token)), SGLang's
  `multinomial_with_seed`. Drafts are accepted while they equal the token sampled at their position. So the text depends
  on seed, prompt, sampling parameters and weights only.
- `target_only`: the same walk with ordinary random numbers. On a GPU SGLang's own kernels do it, and no hook of this
  file is used.

SGLang's `eagle_sample` has a branch for greedy requests. It computes the target's tokens by argmax, and walks the draft
tree with them (`verify_tree_greedy_func`). The hooks send sampled requests into that branch, too, and replace the
argmax by sampled tokens, after SGLang has applied penalties, biases and grammar masks.

On a GPU the kernel of `kernels/sampling.py` draws from the logits, in plain decoding, too, and gives the log-probs
with the tokens. SGLang's functions draw instead for requests with top-k, top-p or min-p, in plain rounds that ask for
more than a token's log-prob, and on machines without the kernel. Apart from such rounds, which of the two draws a row
does not depend on other rows. Both draw the same token, except where two scores differ by less than the rounding of a
float32 softmax.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megatron_rlspec.kernels import chosen
from megatron_rlspec.rollout.sglang.scheduler import ragged, versions
from megatron_rlspec.rollout.sglang.scheduler.parallel import parallel
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.token_filter import filtered

Hook = tuple[str, Callable, str]
ELEMENTS = 1 << 25  # logits that SGLang's functions sample from at a time: 128 MiB in float32


def hooks(settings: Settings) -> Iterator[Hook]:
    """Yield the hooks for the verifier of the settings, for `http/plugin.py`."""
    from sglang.srt.utils import is_cpu

    if settings.verifier == "position_keyed":
        yield (
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            _keep_seeds,
            "AFTER",
        )
        yield (
            "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
            _sample_filtered,
            "AROUND",
        )
        yield versions.installed().spec_logprobs, known_logprobs, "AROUND"
        if not is_cpu():
            yield "sglang.srt.layers.sampler.Sampler.forward", sample_plain, "AROUND"
    elif not is_cpu():
        return  # `target_only` on a GPU: SGLang's own kernels do it.
    verification = _SampledVerification()
    yield "sglang.srt.speculative.eagle_utils.eagle_sample", verification.prepare, "AROUND"
    yield "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func", verification.walk, "AROUND"


def _keep_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """Put the requests' seeds [B] into a new `SamplingBatchInfo`: SGLang drops them outside its deterministic mode.

    That mode is not used, because it also changes kernels.
    """
    if info.sampling_seed is None:
        seeds = torch.tensor([_seed(request) for request in batch.reqs], dtype=torch.int64)
        info.sampling_seed = seeds.to(batch.device, non_blocking=True)
    return info


def _seed(request: Any) -> int:
    """Return the request's seed, or a hash of its id. All ranks have the same ids, so they draw the same noise."""
    seed = request.sampling_params.sampling_seed
    return zlib.crc32(request.rid.encode()) if seed is None else seed


def _sample_filtered(original: Callable, probs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Draw tokens [N] int32 of requests with top-k, top-p or min-p, with noise that is keyed by the token.

    Wraps SGLang's sampling from filtered probabilities [N, V], which keys the noise by the place in the sorted
    probabilities. Two nearly equal tokens can swap places by rounding, and the text would change.
    """
    from sglang.srt.layers.sampler import multinomial_with_seed

    # The parameters that follow `probs` in SGLang's function, in their order; callers pass some of them by name.
    names = ("top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    seeds = arguments["sampling_seed"]
    if seeds is None or arguments.get("return_filtered_probs"):
        return original(probs, *args, **kwargs)
    min_ps = arguments["min_ps"] if arguments["need_min_p_sampling"] else None
    limits = (arguments["top_ks"], arguments["top_ps"], min_ps)
    logprobs = torch.log(filtered(probs, *limits, kwargs.get("max_top_k")))
    tokens = multinomial_with_seed(logprobs, seeds, arguments["positions"])
    return tokens.view(-1).to(torch.int32)


def limited(info: Any) -> bool:
    """Return whether a request of a `SamplingBatchInfo` has top-k, top-p or min-p. A greedy one has a top-k of 1."""
    return info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling


def only_tokens(top_logprobs_nums: Any, token_ids_logprobs: Any) -> bool:
    """Return whether no request wants log-probs of other tokens than the sampled ones."""
    return not any(top_logprobs_nums or ()) and all(ids is None for ids in token_ids_logprobs or ())


def sample_plain(
    original: Callable,
    layer: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    positions: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """Draw the tokens [B] int32 of a pass without drafts by our kernel, if it gives all that the round needs.

    Wraps SGLang's `Sampler.forward`, which draws otherwise. Log-probs [B] of the tokens go into `logits_output`, if
    they are wanted.
    """
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    kernel = chosen.sampling(logits_output.next_token_logits)
    # whether the round needs what SGLang computes from the probabilities of all tokens
    needs_all = (
        kwargs.get("logprob_logits") is not None
        or getattr(info, "sampling_mask_batch_indices", None) is not None  # of SGLang 0.5.23
        or layer.rl_on_policy_target is not None
        or (return_logprob and (SGLANG_RETURN_ORIGINAL_LOGPROB or layer.enable_deterministic))
        or not only_tokens(top_logprobs_nums, token_ids_logprobs)
    )
    if kernel is None or info.is_all_greedy or info.sampling_seed is None or needs_all:
        wanted = (return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        return original(layer, logits_output, info, *wanted, **kwargs)
    logits = layer._preprocess_logits(logits_output.next_token_logits, info)
    requests = torch.arange(len(logits), device=logits.device)
    tokens, logprobs = sample(kernel, info, logits, positions, requests)
    tokens = tokens.to(torch.int32)
    if return_logprob:
        logits_output.next_token_logprobs = logprobs
    layer._sync_token_ids_across_tp(tokens, info)  # as SGLang's `forward` does after sampling
    return tokens


def known_logprobs(
    original: Callable, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> None:
    """Take the log-probs [B, width] of accepted tokens from the sampling, which gave one for every node's token.

    Wraps SGLang's own computation of these log-probs (`versions.spec_logprobs`). It reads `rlspec_logprobs`, which
    `_SampledVerification.walk` sets: [B * width] in even rows, as in `ragged.py`.
    """
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    sampled_logprobs = getattr(logits_output, "rlspec_logprobs", None)
    only_sampled = only_tokens(batch.top_logprobs_nums, batch.token_ids_logprobs)
    # Indices [B, width] of the accepted nodes, -1 behind the last one. The index -1 reads some log-prob, which SGLang
    # does not use. SGLang 0.5.15.post1 passes (tokens, indices) by position.
    index = kwargs["accept_index"] if "accept_index" in kwargs else args[1]
    if sampled_logprobs is None or not only_sampled or SGLANG_RETURN_ORIGINAL_LOGPROB:
        return original(batch, logits_output, *args, **kwargs)
    logits_output.next_token_logprobs = sampled_logprobs[index.long()]
    return None


@dataclass
class VerifyPass:
    """A verification in progress: what sampling the target's tokens needs.

    A node is a position behind which the target samples: that of a request's newest token, or of one of its drafts.

    info       SGLang's `SamplingBatchInfo`
    logits     [N, V] of the nodes that are verified
    positions  [N] of the nodes, which key the noise
    width      nodes of each request if all drafts are verified: drafts + 1
    output     SGLang's LogitsProcessorOutput, which gets the log-probs
    chosen     which of the drafts are verified; None: all
    """

    info: Any
    logits: torch.Tensor
    positions: torch.Tensor
    width: int
    output: Any = None
    chosen: ragged.Chosen | None = None

    @property
    def requests(self) -> torch.Tensor:
        """Return each node's request [N], by its index in the batch."""
        if self.chosen is not None:
            return self.chosen.requests
        return torch.arange(len(self.logits), device=self.logits.device) // self.width


class _SampledVerification:
    """Hooks around SGLang's verification. They let it walk sampled tokens instead of the likeliest ones.

    SGLang's `eagle_sample` (wrapped by `prepare`) calls `verify_tree_greedy_func` (wrapped by `walk`).
    """

    def __init__(self) -> None:
        # set while `prepare` runs, for `walk`; None: `walk` leaves SGLang's tokens as they are
        self._pass: VerifyPass | None = None

    def prepare(
        self,
        original: Callable,
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrap `eagle_sample`: prepare what `walk` needs. All tensor-parallel ranks call it in the same rounds."""
        info = batch.sampling_info
        chosen = ragged.present.chosen
        greedy = info.is_all_greedy
        output = logits_output
        logits = logits_output.next_token_logits
        positions = verify_input.positions
        if chosen is not None:
            positions = positions[chosen.nodes]
        nodes = len(positions)
        if len(logits) > nodes:  # the outputs of a CUDA graph, which has padding behind the nodes
            logits = logits_output.next_token_logits = logits[:nodes]
            logits_output.hidden_states = logits_output.hidden_states[:nodes]
        if chosen is not None or not greedy:
            width = verify_input.draft_token_num
            self._pass = VerifyPass(info, logits, positions, width, logits_output, chosen)
            # SGLang's condition for the branch for greedy requests. Restored below, also after an error.
            info.is_all_greedy = True
        if chosen is not None:
            # SGLang needs even rows, and takes the argmax of their logits. `walk` replaces the argmax, so one column of
            # zeros is enough.
            logits_output.hidden_states = chosen.to_even_rows(logits_output.hidden_states)
            even = logits.new_zeros(len(verify_input.draft_token), 1)
            output = dataclasses.replace(logits_output, next_token_logits=even)
        try:
            return original(verify_input, batch, output, *args, **kwargs)
        finally:
            info.is_all_greedy = greedy  # the scheduler uses the same object in later rounds
            self._pass = None

    def walk(self, original: Callable, **arguments: Any) -> Any:
        """Wrap `verify_tree_greedy_func`: replace its `target_predict` [B, width], the argmax, by sampled tokens."""
        verified = self._pass
        if verified is not None:
            tokens, logprobs = sample_targets(verified)
            if verified.chosen is not None:
                tokens, logprobs = (
                    verified.chosen.to_even_rows(tokens),
                    verified.chosen.to_even_rows(logprobs),
                )
                arguments["candidates"] = verified.chosen.without_others(arguments["candidates"])
            arguments["target_predict"] = tokens.view(arguments["candidates"].shape)
            verified.output.rlspec_logprobs = logprobs
        return original(**arguments)


def sample_targets(verified: VerifyPass) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the target's token after every node as plain decoding does; return tokens and log-probs [N].

    Collective over the tensor-parallel ranks.
    """
    info = verified.info
    logits = verified.logits
    kernel = chosen.sampling(logits) if info.sampling_seed is not None else None
    tokens, logprobs = sample(kernel, info, logits, verified.positions, verified.requests)
    group = parallel().tp_group
    # Rounding of the logits can differ between ranks, but all ranks must accept the same drafts.
    if group.world_size > 1:
        group.broadcast(tokens, src=0)
    return tokens, logprobs


def sample(
    kernel: ModuleType | None,
    info: Any,
    logits: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from each row of logits [N, V]. Returns tokens [N] int64 and their log-probs [N].

    The kernel draws the rows whose request has no top-k, top-p or min-p. SGLang's functions draw the other rows, a few
    rows at a time: these functions copy the logits, some in float64, and the copies must fit into memory.

    kernel     `kernels/sampling.py`; None: SGLang's functions draw all rows
    info       SGLang's `SamplingBatchInfo`, of B requests
    positions  [N] of the rows, which key the noise
    requests   [N] the request of each row, by its index in `info`
    """
    rows, vocabulary = logits.shape
    rows_at_a_time = max(1, ELEMENTS // vocabulary)
    # the rows that SGLang's functions draw, some at a time
    groups: Iterable[slice | torch.Tensor] = ()
    if kernel is None:
        tokens = positions.new_empty(rows, dtype=torch.int64)
        logprobs = logits.new_empty(rows, dtype=torch.float32)
        groups = [slice(first, first + rows_at_a_time) for first in range(0, rows, rows_at_a_time)]
    else:
        seeds = info.sampling_seed[requests]
        # The kernel draws all rows: to leave some out would cost a copy of the logits. Rows with top-k, top-p or min-p
        # are drawn again below.
        tokens, logprobs = kernel.sample(logits, seeds, positions, info.temperatures[requests])
        if limited(info):
            has_limit = (info.top_ks < vocabulary) | (info.top_ps < 1) | (info.min_ps > 0)
            # `nonzero` waits for the device, once a pass: the host must know how many rows have a limit.
            groups = has_limit[requests].nonzero()[:, 0].split(rows_at_a_time)
    for group in groups:
        drawn = _sample_rows(info, logits[group], positions[group], requests[group])
        tokens[group], logprobs[group] = drawn
    return tokens, logprobs


def _sample_rows(
    info: Any, logits: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [N] int64 by SGLang's functions; return them and their log-probs [N]. Arguments as of `sample`.

    The log-probs are those at the request's temperature, before top-k, top-p and min-p, as the kernel gives them.
    """
    from sglang.srt.layers import sampler

    seeds = None if info.sampling_seed is None else info.sampling_seed[requests]
    logits = logits / info.temperatures[requests]
    probs = versions.installed().softmax(logits)
    if limited(info):
        tokens = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            info.top_ks[requests],
            info.top_ps[requests],
            info.min_ps[requests],
            info.need_min_p_sampling,
            seeds,
            positions,
            **versions.installed().known_top_k(info),
        )
    else:
        tokens = sampler.sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    tokens = tokens.long()
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0]
    return tokens, logprobs
