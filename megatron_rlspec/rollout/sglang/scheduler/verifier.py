"""Verifies drafts by sampling: at every position it takes the token that plain decoding would sample.

Position-keyed: a token is the argmax of log p + Gumbel(hash(seed, position, token)), SGLang's `multinomial_with_seed`.
Drafts are accepted while they equal the token sampled at their position. So the text depends on seed, prompt and
weights only. Target-only is the same walk with ordinary random numbers.

SGLang's `eagle_sample` has a branch that walks the draft tree with given target tokens (`verify_tree_greedy_func`),
which it computes by argmax. The hooks send sampled requests into that branch and replace those tokens by sampled ones,
after SGLang has applied penalties, biases and grammar masks.

On a GPU the kernel of `kernels/sampling.py` draws from the logits, in plain decoding, too, and gives the log-probs
with the tokens. Rows of requests with top-k, top-p or min-p, rounds that ask for more than a token's log-prob, and
machines without the kernel take SGLang's functions. Which of the two draws a row does not depend on other rows. Both
draw the same token, except where two scores differ by less than the rounding of a float32 softmax.
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
ELEMENTS = 1 << 25  # of the logits that are sampled from at a time: 128 MiB in float32


def hooks(settings: Settings) -> Iterator[Hook]:
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
        return  # SGLang's own kernels verify so where they exist.
    sampled = _SampledVerification()
    yield "sglang.srt.speculative.eagle_utils.eagle_sample", sampled.sample, "AROUND"
    yield "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func", sampled.walk, "AROUND"


def _keep_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """Put the requests' seeds back, which SGLang drops outside its deterministic mode (that changes kernels, too)."""
    if info.sampling_seed is None:
        filled = torch.tensor([_seed(request) for request in batch.reqs], dtype=torch.int64)
        info.sampling_seed = filled.to(batch.device, non_blocking=True)
    return info


def _seed(request: Any) -> int:
    """Return the request's seed. One that has none gets its own, of its id, which all ranks have."""
    seed = request.sampling_params.sampling_seed
    return zlib.crc32(request.rid.encode()) if seed is None else seed


def _sample_filtered(original: Callable, probs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Key the noise by token: SGLang keys it by rank, and swapped ranks of near-equal tokens would change the text."""
    from sglang.srt.layers.sampler import multinomial_with_seed

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
    """Whether no request asks for log-probs of other tokens than its own."""
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
    """Draw the tokens [B] of a plain decode round by `sample`, if there is a kernel and the round asks for no more."""
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    kernel = chosen.sampling(logits_output.next_token_logits)
    other = (  # what SGLang computes from the probabilities of all tokens
        kwargs.get("logprob_logits") is not None
        or getattr(info, "sampling_mask_batch_indices", None) is not None  # of SGLang 0.5.23
        or layer.rl_on_policy_target is not None
        or (return_logprob and (SGLANG_RETURN_ORIGINAL_LOGPROB or layer.enable_deterministic))
        or not only_tokens(top_logprobs_nums, token_ids_logprobs)
    )
    if kernel is None or info.is_all_greedy or info.sampling_seed is None or other:
        asked = (return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        return original(layer, logits_output, info, *asked, **kwargs)
    logits = layer._preprocess_logits(logits_output.next_token_logits, info)
    requests = torch.arange(len(logits), device=logits.device)
    tokens, logprobs = sample(kernel, info, logits, positions, requests)
    tokens = tokens.to(torch.int32)
    if return_logprob:
        logits_output.next_token_logprobs = logprobs
    layer._sync_token_ids_across_tp(tokens, info)
    return tokens


def known_logprobs(
    original: Callable, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> None:
    """Take the log-probs [B, width] of accepted tokens from the sampling, which gave one for every node's token."""
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    sampled_logprobs = getattr(logits_output, "rlspec_logprobs", None)
    plain = only_tokens(batch.top_logprobs_nums, batch.token_ids_logprobs)
    # SGLang 0.5.15.post1 passes the index by its place, behind the tokens
    index = kwargs["accept_index"] if "accept_index" in kwargs else args[1]
    if sampled_logprobs is None or not plain or SGLANG_RETURN_ORIGINAL_LOGPROB:
        return original(batch, logits_output, *args, **kwargs)
    logits_output.next_token_logprobs = sampled_logprobs[index.long()]
    return None


@dataclass
class VerifyPass:
    """A verification in progress: what sampling the target's tokens needs.

    logits     [N, V] of the nodes that are verified
    positions  [N]
    width      nodes of each request, if nothing is chosen
    output     SGLang's LogitsProcessorOutput
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
        """Return the requests [N] of the nodes."""
        if self.chosen is not None:
            return self.chosen.requests
        return torch.arange(len(self.logits), device=self.logits.device) // self.width


class _SampledVerification:
    """Hooks around SGLang's verification, which have it walk sampled tokens."""

    def __init__(self) -> None:
        self._pass: VerifyPass | None = None  # the one in progress, if its tokens are sampled

    def sample(
        self,
        original: Callable,
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        info = batch.sampling_info
        chosen = ragged.present.chosen
        greedy = info.is_all_greedy
        output = logits_output
        logits = logits_output.next_token_logits
        positions = verify_input.positions
        if chosen is not None:
            positions = positions[chosen.nodes]
        nodes = len(positions)
        if len(logits) > nodes:  # those of a CUDA graph
            logits = logits_output.next_token_logits = logits[:nodes]
            logits_output.hidden_states = logits_output.hidden_states[:nodes]
        if chosen is not None or not greedy:
            width = verify_input.draft_token_num
            self._pass = VerifyPass(info, logits, positions, width, logits_output, chosen)
            info.is_all_greedy = True  # SGLang's condition for the branch that walks given tokens
        if chosen is not None:
            # SGLang takes the argmax of even rows before `walk` replaces it.
            logits_output.hidden_states = chosen.even(logits_output.hidden_states)
            even = logits.new_zeros(len(verify_input.draft_token), 1)
            output = dataclasses.replace(logits_output, next_token_logits=even)
        try:
            return original(verify_input, batch, output, *args, **kwargs)
        finally:
            info.is_all_greedy = greedy
            self._pass = None

    def walk(self, original: Callable, **walk: Any) -> Any:
        verified = self._pass
        if verified is not None:
            tokens, logprobs = sample_targets(verified)
            if verified.chosen is not None:
                tokens, logprobs = verified.chosen.even(tokens), verified.chosen.even(logprobs)
                walk["candidates"] = verified.chosen.without_others(walk["candidates"])
            walk["target_predict"] = tokens.view(walk["candidates"].shape)
            verified.output.rlspec_logprobs = logprobs
        return original(**walk)


def sample_targets(verified: VerifyPass) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the target's token after every node [N] as plain decoding does; return it and its log-prob."""
    info = verified.info
    logits = verified.logits
    kernel = chosen.sampling(logits) if info.sampling_seed is not None else None
    tokens, logprobs = sample(kernel, info, logits, verified.positions, verified.requests)
    group = parallel().tp_group
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
    """Draw a token [N] int64 from each row of logits [N, V], by the kernel if its request [N] has no limit.

    Returns the tokens and their log-probs [N]. Other rows are sampled a few at a time: SGLang's functions copy the
    logits, some of them in float64.
    """
    rows, vocabulary = logits.shape
    most = max(1, ELEMENTS // vocabulary)
    others: Iterable[slice | torch.Tensor] = ()
    if kernel is None:
        tokens = positions.new_empty(rows, dtype=torch.int64)
        logprobs = logits.new_empty(rows, dtype=torch.float32)
        others = [slice(first, first + most) for first in range(0, rows, most)]
    else:
        seeds = info.sampling_seed[requests]
        tokens, logprobs = kernel.sample(logits, seeds, positions, info.temperatures[requests])
        if limited(info):
            of_requests = (info.top_ks < vocabulary) | (info.top_ps < 1) | (info.min_ps > 0)
            others = of_requests[requests].nonzero()[:, 0].split(most)
    for some in others:
        drawn = _sample_rows(info, logits[some], positions[some], requests[some])
        tokens[some], logprobs[some] = drawn
    return tokens, logprobs


def _sample_rows(
    info: Any, logits: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [N] by SGLang's functions, and their log-probs."""
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
