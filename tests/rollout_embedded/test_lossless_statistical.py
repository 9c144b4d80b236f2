"""Sampling losslessness in float32, and the known-bad samplers that these tests must reject.

Outcomes are all continuations of two tokens (16 of them) or of four, merged into 16 bins of nearly equal mass. The
chi-square test at level ALPHA with SAMPLES samples has power above 0.99 against anything 0.02 away in total variation.
Every control's exact total variation is found by enumeration and printed; the mildest lies within twice that size.
"""

from __future__ import annotations

from collections import defaultdict

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from lossless_tools import Enumeration, Target, bins_of, chi_square, power, total_variation
from test_lossless_exact import first_blocks, whole_samples

from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.rounds import Rounds
from megatron_rlspec.types import Sampling, SpecConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.lossless
SAMPLES, ALPHA, DETECTABLE = 40_000, 1e-3, 0.02
PROMPT = (1, 2, 0, 3, 1)


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(vocab=4, hidden=8, layers=1, heads=2, kv_heads=1, seed=11, sharpness=0.7)


def engine_of(model, verifier, spec, dtype):
    room = {"max_running_requests": 2000, "max_total_tokens": 60_000, "max_length": 32, "max_draft_tokens": 8}
    return oracle.engine_of(*model, spec, verifier=verifier, dtype=dtype, **room)


def sampling_of(length):
    return Sampling(max_new_tokens=length, ignore_eos=True)


def p_value(model, verifier, spec, length) -> tuple[float, float]:
    """(p-value of the target's distribution, TV of the binned frequencies from it) for SAMPLES samples."""
    expected = Target(*model, sampling_of(length)).sequences(PROMPT, length)
    where = bins_of(expected)
    mass = np.zeros(16)
    for outcome, p in expected.items():
        mass[where[outcome]] += p
    engine = engine_of(model, verifier, spec, torch.float32)
    counts = np.zeros(16)
    for sample in engine.generate(oracle.requests([PROMPT], group=SAMPLES, seed=1), sampling_of(length)):
        counts[where[tuple(sample.response.tolist())]] += 1
    return chi_square(counts, mass), 0.5 * np.abs(counts / SAMPLES - mass).sum()


def exact_tv(model, verifier, control) -> float:
    """Over two tokens, drafted one at a time, with the control in place."""
    target = Target(*model, sampling_of(2))
    with pytest.MonkeyPatch.context() as patch:
        enumeration = Enumeration(patch)
        control(patch)
        if verifier == "rejection":  # too many paths for two rounds at once: join the rounds by their tokens
            got = defaultdict(float)
            for block, p in round_blocks(model, verifier, enumeration, PROMPT).items():
                rest = round_blocks(model, verifier, enumeration, PROMPT + block) if len(block) == 1 else {(): 1.0}
                for more, q in rest.items():
                    got[(block + more)[:2]] += p * q
        else:
            engine = engine_of(model, verifier, SpecConfig(1), torch.float64)
            got = whole_samples(engine, enumeration, sampling_of(2), PROMPT)
    assert sum(got.values()) == pytest.approx(1, abs=1e-9)
    return total_variation(got, target.sequences(PROMPT, 2))


def round_blocks(model, verifier, enumeration, prompt):
    return first_blocks(engine_of(model, verifier, SpecConfig(1), torch.float64), enumeration, sampling_of(1), prompt)


# -- samplers that are wrong


def argmax_verify(patch):
    patch.setattr(verify, "sample", lambda logp, *_: logp.argmax(-1))


def resampling_without_the_residual(patch):
    _patch_reject(patch, residual=lambda p, q: p)


def ratio_of_another_q(patch):
    """Drafts are drawn from the drafter at temperature 1, the ratio takes it at 0.8."""
    real = verify.reject

    def reject(drafts, q, *args):
        return real(drafts, torch.softmax(q.log() / 0.8, -1), *args)

    patch.setattr(verify, "reject", reject)


def one_token_too_many(patch):
    """The token behind the last accepted draft is the drafter's, unverified."""
    real = verify.walk

    def walk(tokens, parents, valid, targets):
        path, accepted = real(tokens, parents, valid, targets)
        for i, a in enumerate(accepted):
            if a + 1 < tokens.shape[1]:
                targets[i, path[i, a]] = tokens[i, path[i, a] + 1]
        return path, accepted

    patch.setattr(verify, "walk", walk)


def stale_target_keys_after_a_rejected_branch(patch):
    """From the second round on, the pending token keeps the keys that the rejected draft left in its slot."""
    plan, verify_, verifying = Cache.plan, Rounds._verify, []

    def patched_verify(self, *args, **kwargs):
        verifying.append(True)
        try:
            return verify_(self, *args, **kwargs)
        finally:
            verifying.pop()

    def patched_plan(self, read, columns, **kwargs):
        made = plan(self, read, columns, **kwargs)
        if not verifying:
            return made
        write = made.write.view(columns.shape).clone()
        write[columns[:, 0] > len(PROMPT) - 1, 0] = self.total - 1  # a slot that nobody holds
        return made._replace(write=write.view(-1))

    patch.setattr(Rounds, "_verify", patched_verify)
    patch.setattr(Cache, "plan", patched_plan)


def thresholds_below_one(patch):
    """A draft is accepted at a ratio of 0.9 already (SGLang's accept thresholds)."""
    real = verify.coin
    patch.setattr(verify, "coin", lambda probability, *keys: real(probability / 0.9, *keys))


def tree_pruned_by_sampled_q(patch):
    """Of two drafts drawn from q, the likelier goes on to rejection with q."""
    real, state = verify.draw, {"in_reject": False}
    reject = verify.reject

    def guarded(*args):
        state["in_reject"] = True
        try:
            return reject(*args)
        finally:
            state["in_reject"] = False

    def draw(logprobs, seeds, keys):
        first = real(logprobs, seeds, keys)
        if state["in_reject"]:
            return first
        second = real(logprobs, seeds + 1, keys + (1 << 20))
        both = torch.stack([first, second], 1)
        return both.gather(1, logprobs.gather(1, both).argmax(1, keepdim=True))[:, 0]

    patch.setattr(verify, "reject", guarded)
    patch.setattr(verify, "draw", draw)


def _patch_reject(patch, residual):
    def reject(drafts, q, p, coin_seeds, residual_seeds, keys):
        b, k = drafts.shape
        rows = torch.arange(b)
        ratio = p[:, :k].gather(2, drafts[:, :, None]) / q.gather(2, drafts[:, :, None])
        ok = verify.coin(ratio.reshape(-1), coin_seeds.repeat_interleave(k), keys[:, :k].reshape(-1)).view(b, k)
        accepted = ok.long().cumprod(1).sum(1)
        left = torch.cat([residual(p[:, :k], q), p[:, k:]], 1)[rows, accepted]
        commit = torch.cat([drafts, torch.full_like(drafts[:, :1], -1)], 1)
        commit[torch.arange(k + 1) > accepted[:, None]] = -1
        commit[rows, accepted] = verify.draw(left.log(), residual_seeds, keys[rows, accepted])
        # A replacement may be the rejected draft again; then the walk goes on to the next node and commits its token.
        after = (accepted + 1).clamp(max=k)
        again = (accepted < k) & (commit[rows, accepted] == drafts[rows, accepted.clamp(max=k - 1)])
        next_token = verify.draw(p[rows, after].log(), residual_seeds, keys[rows, after])
        commit[rows, after] = torch.where(again, next_token, commit[rows, after])
        return commit

    patch.setattr(verify, "reject", reject)


CONTROLS = {
    argmax_verify: "target_only",
    resampling_without_the_residual: "rejection",
    ratio_of_another_q: "rejection",
    one_token_too_many: "target_only",
    stale_target_keys_after_a_rejected_branch: "target_only",
    thresholds_below_one: "rejection",
    tree_pruned_by_sampled_q: "rejection",
}


def test_the_power_is_what_the_docstring_says():
    least = power(SAMPLES, DETECTABLE, 16, ALPHA)
    print(f"  {SAMPLES} samples, 16 bins, level {ALPHA}: power {least:.4f} at TV {DETECTABLE}")
    assert least > 0.99


def test_every_control_is_wrong_and_one_only_just(model):
    assert exact_tv(model, "rejection", lambda patch: None) < 1e-12
    sizes = {control: exact_tv(model, verifier, control) for control, verifier in CONTROLS.items()}
    for control, tv in sizes.items():
        print(f"  {control.__name__}: TV {tv:.4f}")
    assert all(tv > DETECTABLE for tv in sizes.values())
    assert min(sizes.values()) < 2 * DETECTABLE


@pytest.mark.parametrize(
    "control",
    [c if c is thresholds_below_one else pytest.param(c, marks=pytest.mark.slow) for c in CONTROLS],
    ids=lambda control: control.__name__,
)
def test_the_statistical_test_rejects_the_controls(model, monkeypatch, control):
    control(monkeypatch)
    p, tv = p_value(model, CONTROLS[control], SpecConfig(1), 2)
    print(f"  {control.__name__}: p = {p:.1e}, observed TV {tv:.4f}")
    assert p < ALPHA


@pytest.mark.parametrize(
    ("verifier", "spec", "length"),
    [
        ("rejection", SpecConfig(1), 2),
        pytest.param("rejection", SpecConfig(3), 4, marks=pytest.mark.slow),
        pytest.param("target_only", SpecConfig(1), 2, marks=pytest.mark.slow),
        pytest.param("target_only", SpecConfig(3), 4, marks=pytest.mark.slow),
        ("target_only", SpecConfig(3, 2, 6), 4),
        pytest.param("position_keyed", SpecConfig(3, 2, 6), 4, marks=pytest.mark.slow),
    ],
)
def test_sampling_is_lossless_in_float32(model, verifier, spec, length):
    p, tv = p_value(model, verifier, spec, length)
    print(f"  {verifier} {spec}, {length} tokens: p = {p:.3f}, observed TV {tv:.4f}")
    assert p > ALPHA
