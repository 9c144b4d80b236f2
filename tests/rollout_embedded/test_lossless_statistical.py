"""Sampling losslessness in float32 and bfloat16, and the known-bad samplers that these tests must reject.

Outcomes are all continuations of two tokens (16 of them) or of four, merged into 16 bins of nearly equal mass. The
chi-square test at level ALPHA with SAMPLES samples has power above 0.99 against anything 0.02 away in total variation.
Every control's exact total variation is found by enumeration and printed; the mildest lies within twice that size.
"""

from __future__ import annotations

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from lossless_tools import Enumeration, Target, bins_of, chi_square, power, total_variation
from test_lossless_exact import whole_samples

from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.rounds import RoundRunner
from megatron_rlspec.types import Sampling, SpecConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.lossless
SAMPLES, ALPHA, DETECTABLE = 40_000, 1e-3, 0.02
PROMPT = (1, 2, 0, 3, 1)


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(vocab=4, hidden=8, layers=1, heads=2, kv_heads=1, seed=11, sharpness=0.7)


@pytest.fixture(scope="module")
def rounded(model):
    """Return the model with weights that bfloat16 holds."""
    config, tensors = model
    return config, {name: tensor.bfloat16().double() for name, tensor in tensors.items()}


def engine_of(model, verifier, spec, dtype, device="cpu"):
    room = {"max_running_requests": 2000, "max_total_tokens": 60_000, "max_length": 32}
    return oracle.engine_of(*model, spec, verifier=verifier, dtype=dtype, device=device, **room)


def sampling_of(length, top_k=-1):
    return Sampling(max_new_tokens=length, ignore_eos=True, top_k=top_k)


def p_value(model, verifier, spec, length, top_k=-1, dtype=torch.float32, device="cpu") -> tuple[float, float]:
    """(p-value of the target's distribution, TV of the binned frequencies from it) for SAMPLES samples.

    The p-value is 0 if a sample has a text that the target never gives.
    """
    sampling = sampling_of(length, top_k)
    expected = Target(*model, sampling).sequences(PROMPT, length)
    bins = min(16, sum(p > 0 for p in expected.values()))
    where = bins_of(expected, bins)
    mass = np.zeros(bins)
    for outcome, p in expected.items():
        mass[where[outcome]] += p
    engine = engine_of(model, verifier, spec, dtype, device)
    counts, impossible = np.zeros(bins), 0
    for sample in engine.generate(oracle.requests([PROMPT], group=SAMPLES, seed=1), sampling):
        found = where[tuple(sample.response.tolist())]
        if found < 0:
            impossible += 1
        else:
            counts[found] += 1
    tv = 0.5 * (np.abs(counts / SAMPLES - mass).sum() + impossible / SAMPLES)
    return 0.0 if impossible else chi_square(counts, mass), tv


def exact_tv(model, verifier, control, top_k=-1) -> float:
    """Over two tokens, drafted one at a time, with the control in place."""
    sampling = sampling_of(2, top_k)
    target = Target(*model, sampling)
    with pytest.MonkeyPatch.context() as patch:
        enumeration = Enumeration(patch)
        control(patch)
        engine = engine_of(model, verifier, SpecConfig(1), torch.float64)
        got = whole_samples(engine, enumeration, sampling, PROMPT)
    assert sum(got.values()) == pytest.approx(1, abs=1e-9)
    return total_variation(got, target.sequences(PROMPT, 2))


# -- samplers that are wrong


def argmax_verify(patch):
    patch.setattr(verify, "sample", lambda logp, *_: logp.argmax(-1))


def one_token_too_many(patch):
    """The token behind the last accepted draft is the drafter's, unverified."""
    real = verify.count_accepted

    def count(tokens, valid, targets):
        accepted = real(tokens, valid, targets)
        for i, a in enumerate(accepted):
            if a + 1 < tokens.shape[1]:
                targets[i, a] = tokens[i, a + 1]
        return accepted

    patch.setattr(verify, "count_accepted", count)


def stale_target_keys_after_a_rejected_branch(patch):
    """From the second round on, the pending token keeps the keys that the rejected draft left in its slot."""
    plan, verify_, verifying = Cache.plan, RoundRunner._verify, []

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

    patch.setattr(RoundRunner, "_verify", patched_verify)
    patch.setattr(Cache, "plan", patched_plan)


def a_twelfth_colder(patch):
    """The target is sampled at 12/13 of the temperature."""
    real = verify.draw
    patch.setattr(verify, "draw", lambda logprobs, seeds, keys: real(logprobs * 13 / 12, seeds, keys))


def top_k_keeps_one_more(patch):
    """Of tokens ranked 0, 1, 2, ... those above top_k stay out, but the one at top_k stays in."""
    real = verify.filtered
    patch.setattr(verify, "filtered", lambda logp, s: real(logp, s._replace(top_k=s.top_k + (s.top_k > 0))))


def periodic_noise(patch):
    """The noise of a position comes back eight positions later."""
    real = verify.draw
    patch.setattr(verify, "draw", lambda logprobs, seeds, keys: real(logprobs, seeds, keys % 8))


CONTROLS = {
    argmax_verify: "target_only",
    one_token_too_many: "target_only",
    stale_target_keys_after_a_rejected_branch: "target_only",
    a_twelfth_colder: "target_only",
    top_k_keeps_one_more: "position_keyed",
}
TOP_K = {top_k_keeps_one_more: 2}  # what the controls sample with, if not with the whole softmax


def test_the_power_is_that_of_the_docstring():
    least = power(SAMPLES, DETECTABLE, 16, ALPHA)
    print(f"  {SAMPLES} samples, 16 bins, level {ALPHA}: power {least:.4f} at TV {DETECTABLE}")
    assert least > 0.99


@pytest.mark.slow
def test_every_control_is_wrong_and_one_only_just(model):
    assert exact_tv(model, "target_only", lambda patch: None) < 1e-12
    assert exact_tv(model, "position_keyed", lambda patch: None, top_k=2) < 1e-12
    sizes = {control: exact_tv(model, v, control, TOP_K.get(control, -1)) for control, v in CONTROLS.items()}
    for control, tv in sizes.items():
        print(f"  {control.__name__}: TV {tv:.4f}")
    assert all(tv > DETECTABLE for tv in sizes.values())
    assert min(sizes.values()) < 2 * DETECTABLE


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_the_statistical_test_rejects_the_controls(model, monkeypatch, control):
    control(monkeypatch)
    p, tv = p_value(model, CONTROLS[control], SpecConfig(1), 2, TOP_K.get(control, -1))
    print(f"  {control.__name__}: p = {p:.1e}, observed TV {tv:.4f}")
    assert p < ALPHA


@pytest.mark.parametrize(
    ("verifier", "spec", "length", "top_k"),
    [
        pytest.param("target_only", SpecConfig(3), 4, -1, marks=pytest.mark.slow),
        pytest.param("position_keyed", SpecConfig(3), 4, -1, marks=pytest.mark.slow),
        ("position_keyed", SpecConfig(1), 2, 2),
    ],
)
def test_sampling_is_lossless_in_float32(model, verifier, spec, length, top_k):
    p, tv = p_value(model, verifier, spec, length, top_k)
    print(f"  {verifier} {spec}, {length} tokens, top_k {top_k}: p = {p:.3f}, observed TV {tv:.4f}")
    assert p > ALPHA


CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("verifier", ["position_keyed", "target_only"])
def test_sampling_is_lossless_in_bfloat16(rounded, verifier, device):
    """Texts may differ from plain decoding's, because rounding depends on the shape of a batch. Their distribution
    is that of exact arithmetic but for the rounding, which is far smaller than what the test can see."""
    p, tv = p_value(rounded, verifier, SpecConfig(1), 2, dtype=torch.bfloat16, device=device)
    print(f"  {verifier} in bfloat16 on {device}: p = {p:.3f}, observed TV {tv:.4f}")
    assert p > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_mildest_control_is_rejected_in_bfloat16(rounded, monkeypatch, device):
    a_twelfth_colder(monkeypatch)
    p, tv = p_value(rounded, "target_only", SpecConfig(1), 2, dtype=torch.bfloat16, device=device)
    print(f"  a_twelfth_colder in bfloat16 on {device}: p = {p:.1e}, observed TV {tv:.4f}")
    assert p < ALPHA


# -- noise that comes back: two tokens far apart in one text must be independent where their distributions are

LONGEST_LAG, TEXTS = 16, 4000


def unconditional():
    """A model whose next token does not depend on the text: all tokens have one embedding. Texts are then
    independent draws from one distribution, so the joint distribution of two positions is known exactly."""
    config, tensors = oracle.tiny(vocab=4, hidden=8, layers=1, heads=2, kv_heads=1, seed=11, sharpness=0.7)
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][0].clone()
    return config, tensors


def lag_test() -> tuple[float, int, float, float]:
    """Under the default verifier: (least p-value of any lag, that lag, observed TV there, exact TV of equal noise)."""
    model = unconditional()
    sampling = sampling_of(LONGEST_LAG + 1)
    single = np.array(Target(*model, sampling).next(PROMPT))
    engine = oracle.engine_of(
        *model,
        SpecConfig(3),
        dtype=torch.float32,
        max_running_requests=2000,
        max_total_tokens=100_000,
        max_length=48,
    )
    samples = engine.generate(oracle.requests([PROMPT], group=TEXTS, seed=1), sampling)
    texts = np.array([sample.response for sample in samples])
    joint = np.outer(single, single).ravel()
    worst = (1.0, 0, 0.0)
    for lag in range(1, LONGEST_LAG + 1):
        counts = np.bincount(4 * texts[:, 0] + texts[:, lag], minlength=16)
        tv = 0.5 * np.abs(counts / TEXTS - joint).sum()
        worst = min(worst, (chi_square(counts, joint), lag, tv))
    return *worst, total_variation(dict(enumerate(np.diag(single).ravel())), dict(enumerate(joint)))


def test_noise_does_not_come_back_under_the_default_verifier():
    p, lag, tv, _ = lag_test()
    print(f"  {LONGEST_LAG} lags, {TEXTS} texts: least p = {p:.3f} at lag {lag}, observed TV {tv:.4f}")
    assert p > ALPHA / LONGEST_LAG


def test_periodic_noise_is_rejected_under_the_default_verifier(monkeypatch):
    periodic_noise(monkeypatch)
    p, lag, tv, exact = lag_test()
    print(f"  periodic_noise: p = {p:.1e} at lag {lag}, observed TV {tv:.4f}, exact TV {exact:.4f}")
    assert p < ALPHA / LONGEST_LAG and lag in (8, 16) and tv == pytest.approx(exact, abs=0.03)
