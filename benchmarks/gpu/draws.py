"""Sample the tokens of one round: by the position-keyed verifier with and without its kernel, by SGLang's; log-probs.

The kernel's times have the log-probs in them. SGLang's is target-only verification.
Peaked logits are like those of a language model: the 0.95 nucleus of a row holds from 6 to 235 words. Flat ones are
normal with a standard deviation of 4. Their nuclei hold thousands of words, so a filter has to sort whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gpu.figures import GIB, Figures, forget_peak, median, peak_gib, timed
from gpu.plan import Plan

NUCLEUS = 0.95


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    if not plan.on_gpu:
        from megatron_rlspec.rollout.sglang.cpu import stand_ins

        stand_ins.install()
    requests, nodes = plan.draws
    for kind, make in (("peaked", _peaked), ("flat", _flat)):
        logits = make(requests * nodes, plan.shape.vocab, torch.device(plan.device))
        figures.say(f"{kind}: words in the nucleus of {NUCLEUS}", _nucleus(logits), "", "median of 64 rows")
        works = _ours(plan, logits) | (_sglangs(plan, logits) if kind == "peaked" else {})
        if plan.on_gpu:
            with figures.attempt(f"{kind}, kernel"):
                works |= _kernels(plan, logits, figures, kind)
        for name, work in works.items():
            with figures.attempt(f"{kind}, {name}"):
                _measure(plan, figures, f"{kind}, {name}", work)
        del logits, works


def _measure(plan: Plan, figures: Figures, name: str, work: Callable[[], Any]) -> None:
    figures.say(f"{name}: first call", timed(work), "ms", "with what it compiles")
    before = torch.cuda.memory_allocated() if plan.on_gpu else 0
    forget_peak()
    requests, nodes = plan.draws
    note = f"{requests} requests of {nodes} nodes, {plan.shape.vocab} words"
    figures.say(f"{name}: a round", median(plan.repeats, work), "ms", note)
    peak = peak_gib()
    if peak is not None:
        figures.say(f"{name}: peak beyond the logits", peak - before / GIB, "GiB")


def _peaked(rows: int, words: int, device: torch.device) -> torch.Tensor:
    """Make rows in which the r-th likeliest word has a probability in proportion to r to the power of -1.5 to -2.5."""
    powers = torch.linspace(1.5, 2.5, rows, device=device)
    ranks = torch.arange(1, words + 1, device=device).log()
    logits = torch.empty(rows, words, device=device)
    for row in range(rows):
        logits[row, torch.randperm(words, device=device)] = -powers[row] * ranks
    return logits


def _flat(rows: int, words: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, words, device=device) * 4


def _nucleus(logits: torch.Tensor) -> float:
    ordered = logits[:: max(1, len(logits) // 64)].softmax(-1).sort(descending=True).values
    return float(((ordered.cumsum(-1) - ordered) < NUCLEUS).sum(-1).float().median())


def _kernels(plan: Plan, logits: torch.Tensor, figures: Figures, kind: str) -> dict[str, Callable[[], Any]]:
    """Return calls of the verifier with its kernel, and say how many of its tokens plain torch draws, too."""
    from megatron_rlspec.kernels import chosen

    if chosen.sampling(logits) is None:
        raise RuntimeError("the sampling kernel is not used here; the part's log says why")
    plain = _ours(plan, logits)
    works = {}
    for name, work in _ours(plan, logits, kernel=True).items():
        named = name.replace("ours", "kernel")
        works[named] = work
        equal = int((work() == plain[name]()).sum())
        figures.say(f"{kind}, {named}: tokens equal to plain torch's", equal, "", f"of {len(logits)}")
    requests, _ = plan.draws
    rows = torch.arange(requests, device=logits.device)
    ones = torch.ones(requests, device=logits.device)
    draws = chosen.sampling(logits).Draws(rows, rows, ones, sharpness=ones)  # type: ignore[union-attr]
    works["coupled drafts of one pass"] = lambda: chosen.sampling(logits).sample(logits[:requests], draws)  # type: ignore[union-attr]
    works["likeliest tokens of one pass"] = lambda: logits[:requests].argmax(-1)
    return works


def _ours(plan: Plan, logits: torch.Tensor, kernel: bool = False) -> dict[str, Callable[[], Any]]:
    """Return calls of what the engine's verifier calls after a round, with its kernel or in plain torch."""
    from megatron_rlspec.kernels import chosen
    from megatron_rlspec.rollout.sglang.scheduler import verifier, versions

    requests, nodes = plan.draws
    device = logits.device
    installed = versions.installed()

    def verified(top_p: float) -> Any:
        info = SimpleNamespace(
            temperatures=torch.ones(requests, 1, device=device),
            top_ks=torch.full((requests,), plan.shape.vocab, dtype=torch.int32, device=device),
            top_ps=torch.full((requests,), top_p, device=device),
            min_ps=torch.zeros(requests, device=device),
            need_top_p_sampling=top_p < 1,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            sampling_seed=torch.arange(requests, device=device),
            max_top_k=plan.shape.vocab,
        )
        positions = torch.arange(requests * nodes, device=device)
        return verifier.VerifyPass(info, logits, positions, nodes)

    def sample(top_p: float) -> Callable[[], Any]:
        given = verified(top_p)

        def work() -> Any:
            alone = SimpleNamespace(world_size=1)  # this process has no tensor-parallel group
            used = chosen.sampling(logits) if kernel else None
            with (
                mock.patch.object(type(installed), "tensor_group", lambda _: alone),
                mock.patch.object(chosen, "sampling", lambda _: used),
            ):
                if top_p == 1:
                    return verifier.sample_targets(given)
                from sglang.srt.layers import sampler

                name = "top_k_top_p_min_p_sampling_from_probs_torch"
                hooked = _hooked(getattr(sampler, name), verifier._sample_filtered)
                with mock.patch.object(sampler, name, hooked):
                    return verifier.sample_targets(given)

        return work

    drawn = {"ours at T = 1": sample(1.0), "ours with top-p": sample(NUCLEUS)}
    return drawn if kernel else {"argmax": lambda: logits.argmax(-1), **drawn}


def _hooked(original: Callable, hook: Callable) -> Callable:
    """Return the function as the plugin's AROUND hook leaves it."""
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


def _sglangs(plan: Plan, logits: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return calls of SGLang's own verification of a chain, and of the log-probs that rollouts ask for."""
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs
    from sglang.srt.speculative import eagle_utils

    requests, nodes = plan.draws
    device = logits.device
    temperatures = torch.ones(requests, 1, device=device)
    candidates = torch.randint(0, plan.shape.vocab, (requests, nodes), device=device)
    index = torch.arange(requests * nodes, device=device).view(requests, nodes)
    following = torch.arange(1, nodes + 1, device=device).repeat(requests, 1)
    following[:, -1] = -1

    def verify(top_p: float) -> Any:
        probs = eagle_utils.sampling_softmax(logits, temperatures=temperatures.repeat_interleave(nodes, 0))
        if top_p < 1:
            probs = eagle_utils.top_p_renorm_prob(probs, torch.full((len(logits),), top_p, device=device))
        probs = probs.view(requests, nodes, -1)
        predicted = torch.zeros(requests * nodes, dtype=torch.int32, device=device)
        eagle_utils.tree_speculative_sampling_target_only(
            predicts=predicted,
            accept_index=torch.full((requests, nodes), -1, dtype=torch.int32, device=device),
            accept_token_num=torch.empty(requests, dtype=torch.int32, device=device),
            candidates=candidates,
            retrive_index=index,
            retrive_next_token=following,
            retrive_next_sibling=torch.full_like(following, -1),
            uniform_samples=torch.rand(requests, nodes, device=device),
            uniform_samples_for_final_sampling=torch.rand(requests, device=device),
            target_probs=probs,
            draft_probs=torch.zeros_like(probs),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )
        return predicted

    def log_probs() -> Any:
        info = SimpleNamespace(is_all_greedy=False, temperatures=temperatures)
        batch = SimpleNamespace(
            seq_lens=temperatures.view(-1), sampling_info=info, top_logprobs_nums=None, token_ids_logprobs=None
        )
        output = SimpleNamespace(next_token_logits=logits)
        compute_spec_logprobs(batch, output, candidates.view(-1), chain_stride=nodes)
        return output.next_token_logprobs

    found: dict[str, Callable[[], Any]] = {"log-probs": log_probs}
    if plan.on_gpu:  # SGLang has these kernels for GPUs only
        found |= {"SGLang's at T = 1": lambda: verify(1.0), "SGLang's with top-p": lambda: verify(NUCLEUS)}
    return found
