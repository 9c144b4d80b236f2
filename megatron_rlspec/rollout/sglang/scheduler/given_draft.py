"""Draw the keyed token of every position of a given text, in the extend pass that computes its keys and values.

`http/given_draft.py` sends a request's draft as a part of the input, and asks for log-probs from its first token on.
Then SGLang computes the logits of these positions in chunks. The hook draws the tokens of each chunk, as plain decoding
draws them, before SGLang drops its logits. They travel in the place of the log-probs of given tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_rlspec.rollout.sglang.scheduler import verifier, versions
from megatron_rlspec.rollout.sglang.settings import DRAW_ALL, Settings


def hooks(settings: Settings) -> Iterator[verifier.Hook]:
    """Yield the hook on the logits of a pass, for an engine that can check a text."""
    if settings.verifier == "position_keyed" and versions.installed().checks_drafts:
        yield "sglang.srt.layers.logits_processor.LogitsProcessor.forward", draw_all, "AROUND"


def draw_all(
    original: Callable,
    processor: Any,
    input_ids: Any,
    hidden: Any,
    lm_head: Any,
    batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a pass's logits, and draw at all positions of the requests that ask for it. `batch`: a ForwardBatch."""
    drawn = Drawn.of(batch)
    if drawn is None:
        return original(processor, input_ids, hidden, lm_head, batch, *args, **kwargs)
    processor._get_logits = drawn.watched(processor._get_logits)
    try:
        output = original(processor, input_ids, hidden, lm_head, batch, *args, **kwargs)
    finally:
        del processor._get_logits  # the method of the class is back
    drawn.write(output)
    return output


class Drawn:
    """The tokens that are drawn in one extend pass of B requests.

    info    the pass's SamplingBatchInfo
    starts  of each request the first of its own positions in this pass whose logits it asks for
    lengths, before  tokens of each request in this pass, and before it
    asks    of each request whether it asks for draws
    """

    def __init__(
        self, info: Any, starts: list[int], lengths: list[int], before: list[int], asks: list[bool]
    ) -> None:
        # a request without log-probs has the logits of its last
        first = np.minimum(starts, np.asarray(lengths) - 1)
        self.info = info
        self.asks = [
            asked and start < length
            for asked, start, length in zip(asks, starts, lengths, strict=True)
        ]
        # the row after each request's last
        self.ends = np.cumsum(np.asarray(lengths) - first).tolist()
        self._request = np.repeat(np.arange(len(lengths)), np.asarray(lengths) - first)
        rows = [
            np.arange(a, b) for a, b in zip(first + before, np.add(lengths, before), strict=True)
        ]
        self._position = np.concatenate(rows)
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._done = 0  # rows

    @classmethod
    def of(cls, batch: Any) -> Drawn | None:
        """Return the draws of a pass, None if no request of it asks for some."""
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_target_verify() or not batch.return_logprob:
            return None
        asks = [ids == DRAW_ALL for ids in batch.token_ids_logprobs or ()]
        if not any(asks):
            return None
        starts, lengths = batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu
        drawn = cls(batch.sampling_info, starts, lengths, batch.extend_prefix_lens_cpu, asks)
        return drawn if any(drawn.asks) else None

    def watched(self, logits_of: Callable) -> Callable:
        """Return the function that computes a chunk's logits, and draws from them."""

        def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = logits_of(*args, **kwargs)
            self._draw(logits)
            return logits

        return compute

    def _draw(self, logits: torch.Tensor) -> None:
        rows = slice(self._done, self._done + len(logits))
        self._done = rows.stop
        request = torch.from_numpy(self._request[rows]).to(logits.device)
        positions = torch.from_numpy(self._position[rows]).to(logits.device)
        info = copy.copy(self.info)
        for name in ("sampling_seed", "temperatures", "top_ks", "top_ps", "min_ps"):
            setattr(info, name, getattr(self.info, name)[request])
        if info.is_all_greedy:
            tokens, logprobs = logits.argmax(-1), None
        else:
            checked = verifier.VerifyPass(info, logits, positions, width=1)
            tokens = verifier.sample_targets(checked)
            logprobs = checked.logprobs
        self._tokens.append(tokens)
        self._logprobs.append(
            _logprobs(logits, info.temperatures, tokens) if logprobs is None else logprobs
        )

    def write(self, output: Any) -> None:
        """Put the draws into SGLang's LogitsProcessorOutput, of each position a list of one token and one log-prob."""
        tokens, logprobs = torch.cat(self._tokens).tolist(), torch.cat(self._logprobs).float().cpu()
        for i, (first, last) in enumerate(zip([0, *self.ends], self.ends, strict=False)):
            if self.asks[i]:
                output.input_token_ids_logprobs_idx[i] = [[token] for token in tokens[first:last]]
                values = logprobs[first:last, None]
                # SGLang makes lists of tensors later
                waits = output.input_logprobs_copy_done is not None
                output.input_token_ids_logprobs_val[i] = [values] if waits else values.tolist()


def _logprobs(
    logits: torch.Tensor, temperatures: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return log p [N] of `tokens [N]`, with a few rows of `logits [N, V]` at a time.

    On a GPU this runs in memory that SGLang has measured for its own work: it lends the memory of its CUDA graphs.
    """
    rows = max(1, verifier.ELEMENTS // 4 // logits.shape[-1])
    found = []
    for part in zip(logits.split(rows), temperatures.split(rows), tokens.split(rows), strict=True):
        found.append(
            torch.log_softmax(part[0] / part[1], -1).gather(1, part[2].long()[:, None])[:, 0]
        )
    return torch.cat(found)
