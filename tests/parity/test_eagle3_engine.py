"""SGLang's own EAGLE3 beside a tiny target, on the CPU: drafts, texts, switching, pushes. One engine a target.

The drafts are compared with an oracle in plain torch, the log-probs with Transformers. In the fast suite a Llama stands
for all targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import captured
import numpy as np
import pytest
import tiny_eagle3
import torch
import transformers
from eagle3_oracle import Eagle3Oracle
from taking_turns import generate_in_turns
from test_sglang_engine import rounds_of, started

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.engine import EngineError
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import ServedEngines
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Prompt, Request, Sample, Sampling, SpecConfig

pytestmark = pytest.mark.slow
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what differs of the target, and of the drafter
    "Llama": ({}, {}),
    "Qwen2": ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, {}),
    "Qwen3": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, {}),
    "layers and norms": ({}, {"num_hidden_layers": 3, "norm_before_fc": True, "fc_norm": True, "norm_output": True}),
}
LLAMA = pytest.mark.parametrize("served", ["Llama"], indirect=True)  # of what does not depend on the models
DRAFTER = tiny_eagle3.drafter_config(max_position_embeddings=64)  # fewer than the target's, as published ones have
OWN = tiny_eagle3.drafter_weights(DRAFTER)
IDS = OWN["d2t"] + torch.arange(tiny_eagle3.WORDS)
SERVE = (
    "--device cpu --dtype float32 --max-total-tokens 16384 --max-running-requests 32 --spec adaptive --num-steps 3 "
    "--candidate-steps 0,1,2,3 --ragged"
).split()
TOLERANCE = 2e-4
THREE = SpecConfig(3)
SWITCHING = (SpecConfig(1), OFF, SpecConfig(2), SpecConfig(3), OFF, SpecConfig(0))
Drafted = list[tuple[Sample, captured.Chains]]


@dataclass
class Served:
    """An engine, its target, and what it drafted under random weights before anything else.

    folder  holds the directories `target` and `drafter`
    """

    engine: SGLangEngine
    folder: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    drafter: dict[str, Any]
    own: dict[str, torch.Tensor]
    drafted: Drafted

    @property
    def pushed(self) -> dict[str, torch.Tensor]:
        return self.weights | tiny_eagle3.pushed(self.own)

    @cached_property
    def transformers(self) -> Any:
        """Return Transformers' model of the target."""
        known = {key: value for key, value in self.config.items() if key not in ("architectures", "torch_dtype")}
        config = transformers.AutoConfig.for_model(**known)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        model.load_state_dict(self.weights)
        return model

    @torch.no_grad()
    def gaps(self, layers: tuple[int, ...] = (2, 4, 5), **options: Any) -> np.ndarray:
        """Return the largest difference per depth between the engine's draft logits and the oracle's."""
        oracle = Eagle3Oracle(self.drafter, self.own, self.weights["model.embed_tokens.weight"])
        options = {"recursion": "after norm" if self.drafter.get("norm_output") else "before norm"} | options
        worst = np.zeros(captured.DEPTH)
        for sample, found in self.drafted:
            tokens = torch.from_numpy(sample.tokens)
            inputs = self.transformers(tokens[None], output_hidden_states=True).hidden_states  # of each layer
            taps = torch.cat([inputs[layer][0] for layer in layers], dim=-1)
            for t, (chain, expected) in found.items():
                if t < len(tokens) - 1:
                    logits = oracle.logits(taps, tokens, t, chain, **options).numpy()
                    worst = np.maximum(worst, np.abs(logits - expected).max(axis=1))
        return worst


@pytest.fixture(scope="module", params=CASES)
def served(request, tmp_path_factory) -> Iterator[Served]:
    of_target, of_drafter = CASES[request.param]
    config = tiny_eagle3.target_config(**of_target)
    weights = tiny_eagle3.target_weights(config)
    described = DRAFTER | of_drafter
    own = tiny_eagle3.drafter_weights(described)
    folder = tmp_path_factory.mktemp("eagle3")
    model = tiny_eagle3.write(folder / "target", config, weights)
    drafter = tiny_eagle3.write(folder / "drafter", described, own)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        with captured.engine(folder, model, [*SERVE, "--draft-model", str(drafter)]) as engine:
            engine.set_config(THREE)
            drafted = captured.draw(engine, folder, (1, 9), IDS.numpy())
            (folder / "passes").rename(folder / "kept")
            yield Served(engine, folder, config, weights, described, own, drafted)


@pytest.fixture
def engine(served) -> Iterator[SGLangEngine]:
    yield served.engine
    served.engine.update_weights(0, served.pushed.items())
    served.engine.set_config(THREE)
    served.engine.stats()


def asked(count: int, tag: str = "r") -> list[Request]:
    lengths = np.random.default_rng(0).integers(1, 40, count)
    prompts = [Prompt(i, np.random.default_rng(i).integers(3, 160, lengths[i])) for i in range(count)]
    return [Request(f"{tag}-{i:03d}.", prompt, seed=1000 + i) for i, prompt in enumerate(prompts)]


def texts(samples: list[Sample]) -> list[list[int]]:
    return [sample.response.tolist() for sample in samples]


def accept_length(samples: list[Sample]) -> float:
    rounds = np.zeros(4)
    for sample in samples:
        rounds[: len(sample.accepted)] += sample.accepted
    return 1 + float(rounds @ np.arange(4) / rounds.sum())


def test_draft_logits_are_those_of_the_oracle(served):
    drafted = [found for _, found in served.drafted]
    assert {0, 8} <= {t for found in drafted for t in found} and sum(map(len, drafted)) > 15
    assert served.gaps().max() < TOLERANCE


def test_the_trainers_drafter_computes_the_engines_drafts(served):
    import train_ranks

    described = served.config | {"eagle3": served.drafter}
    (worst,) = train_ranks.on_ranks(1, of_trainer, described, served.pushed, served.drafted)
    assert worst.max() < TOLERANCE


def of_trainer(config: dict[str, Any], weights: dict[str, torch.Tensor], drafted: Drafted) -> np.ndarray:
    """Return the largest difference per depth between the trainer's draft logits and the engine's, on a rank."""
    from megatron_rlspec.train.step import Trainer

    options = {"model.dtype": "float32", "drafter.depth": "3", "drafter.kind": "eagle3", "drafter.path": "drafter"}
    trainer = Trainer(load(None, options), config)
    trainer.set_draft_vocabulary(IDS.numpy())
    trainer.load_hf(weights)
    return captured.gaps(trainer, drafted)


def test_the_comparison_sees_other_layers_and_another_recursion(served):
    other = "before norm" if served.drafter.get("norm_output") else "after norm"
    first, *deeper = served.gaps(recursion=other)
    assert first < TOLERANCE and min(deeper) > 100 * TOLERANCE
    assert served.gaps(layers=(1, 4, 5)).min() > 100 * TOLERANCE


def test_the_engine_describes_its_drafter(engine):
    described = engine.describe()
    assert described["eagle3"] == {"taps": [2, 4, 5], "words": fingerprint(IDS)}
    assert described["controller"] == "DraftController" and described["draft_vocabulary"] == 0
    assert described["unnamed"] == ""


@pytest.mark.lossless
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_text_does_not_depend_on_speculation(served, engine, temperature):
    """The drafter drafts well enough that rounds of every length are verified."""
    target, own = tiny_eagle3.agreeing(served.weights, served.own)
    mixed = {name: (tensor + target[name]) / 2 for name, tensor in served.weights.items()}
    engine.update_weights(1, (mixed | tiny_eagle3.pushed(own)).items())
    sampling = Sampling(temperature=temperature, max_new_tokens=48, ignore_eos=True)
    engine.set_config(OFF)
    engine.stats()
    plain = engine.generate(asked(16), sampling)
    assert {s.config for s in engine.stats()} == {OFF} and len({tuple(text) for text in texts(plain)}) > 10
    for configs in ((SpecConfig(3),), SWITCHING):
        accepted = 0
        generate = partial(engine.generate, asked(16), sampling)
        for speculated in generate_in_turns(engine, configs, generate):
            assert texts(speculated) == texts(plain)
            for a, b in zip(speculated, plain, strict=True):
                np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=2e-4)
            accepted += sum(sum(sample.accepted[1:]) for sample in speculated)
        assert accepted > 20
    cost = Roofline(1.0, token_ms=1.0, context_ms=0.0, drafter=0.02)
    engine.set_spec_rule({"candidates": [3], "roofline": cost.to_json(), "ragged": True})
    for _ in range(2):
        engine.stats()
        assert texts(engine.generate(asked(16), sampling)) == texts(plain)
    rounds = engine.stats()
    assert sum(s.verified for s in rounds) < 2.5 * sum(sum(s.accepted) for s in rounds)


def test_log_probs_are_those_of_transformers(served, engine):
    for sample in engine.generate(asked(4), Sampling(temperature=0.7, max_new_tokens=24, ignore_eos=True)):
        tokens = torch.from_numpy(sample.tokens)
        with torch.no_grad():
            logits = served.transformers(tokens[None]).logits[0, :-1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, tokens[1:, None])[:, 0]
        start = sample.prompt_len
        np.testing.assert_allclose(sample.behaviour_logprobs[start:], expected[start - 1 :], atol=5e-4)


def test_drafting_after_off_equals_drafting_after_step_0(served, engine):
    """The states that the drafter missed while off are those of three layers; a catch-up gives it all of them."""
    target, own = tiny_eagle3.agreeing(served.weights, served.own)
    own["midlayer.self_attn.o_proj.weight"] += 0.5 * served.own["midlayer.self_attn.o_proj.weight"]
    own["fc.weight"] = 0.5 * served.own["fc.weight"]
    own["midlayer.mlp.down_proj.weight"] = served.own["midlayer.mlp.down_proj.weight"]
    engine.update_weights(1, (target | tiny_eagle3.pushed(own)).items())
    sampling = Sampling(temperature=0.3, max_new_tokens=300, ignore_eos=True)
    found = {}
    for resting in (SpecConfig(0), OFF):
        engine.set_config(resting)
        engine.stats()
        end = started(engine, asked(3), sampling, least=100)
        engine.set_config(SpecConfig(3))
        found[resting] = [rounds_of(sample) for sample in end()]
        assert {s.config for s in engine.stats()} == {resting, SpecConfig(3)}
    both = []
    for read, caught_up in zip(found[SpecConfig(0)], found[OFF], strict=True):
        both += [(read[start], caught_up[start]) for start in set(read) & set(caught_up)]
    assert all(a == b for a, b in both), [pair for pair in both if pair[0] != pair[1]]
    assert len(both) > 20 and 5 < sum(a > 0 for a, _ in both) < len(both)


def test_each_model_takes_its_own_part_of_a_push(served, engine):
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in served.pushed.items()}
    pusher = Pusher({"e": engine})
    new = {name: tensor * 1.01 for name, tensor in served.pushed.items()}
    assert not pusher.push(1, lambda scope: new.items()).failed
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in new.items()}

    target, own = tiny_eagle3.agreeing(served.weights, served.own)
    sampling = Sampling(temperature=0.3, max_new_tokens=48, ignore_eos=True)
    assert not pusher.push(2, lambda scope: target.items(), "target").failed
    assert {s.policy_versions for s in engine.generate(asked(2), sampling)} == {((2, 0, 48),)}
    random = accept_length(engine.generate(asked(8), sampling))
    assert not pusher.push(3, lambda scope: tiny_eagle3.pushed(own).items(), "drafter").failed
    trained = accept_length(engine.generate(asked(8), sampling))
    print(f"accept length: random drafter {random:.2f}, agreeing drafter {trained:.2f}")
    assert random < 1.3 and trained > 1.7  # a quarter of the words is not among the drafter's

    engine.update_weights(4, served.weights.items())  # a push that knows of no drafter does not touch it
    held = served.weights | tiny_eagle3.pushed(own)
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in held.items()}
    wrong = {**held, "eagle3.fc.weight": served.own["fc.weight"]}
    engine.update_weights(5, wrong.items())
    assert not pusher.push(6, lambda scope: held.items()).failed
    engine.update_weights(7, wrong.items())
    assert pusher.compare_with(pusher.engines["e"]).differing == ("eagle3.fc.weight",)


REFUSED = {
    "another map": ("eagle3.d2t", OWN["d2t"].double(), "the engine has no tensor eagle3.d2t"),
    "other words": (
        "eagle3.lm_head.weight",
        torch.zeros(100, 64),
        r"eagle3.lm_head.weight is \[100, 64\], but .* \[120,",
    ),
    "a tensor of no model": ("eagle3.midlayer.self_attn.q_norm.weight", torch.zeros(16), "the engine has no tensor"),
    "the drafter's name alone": ("fc.weight", OWN["fc.weight"], "the engine has no tensor fc.weight"),
}


@LLAMA
@pytest.mark.parametrize("case", REFUSED)
def test_a_push_that_does_not_fit_is_refused_in_one_line(served, engine, case):
    name, tensor, expected = REFUSED[case]
    before = engine.fingerprints()
    with pytest.raises(EngineError, match=expected):
        engine.update_weights(1, [(name, tensor)], "drafter")
    assert engine.fingerprints() == before and engine.describe()["eagle3"]["words"] == fingerprint(IDS)


OTHERS = {
    "another layer": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}},
    "other words": {"draft_vocab_size": tiny_eagle3.WORDS - 20},
    "no drafter": {},
}


@LLAMA
@pytest.mark.parametrize("case", OTHERS)
def test_a_run_refuses_an_engine_with_another_drafter(served, case, tmp_path):
    """It would not fail: no draft, or few, would be accepted."""
    config = served.drafter | OTHERS[case]
    other = tiny_eagle3.write(tmp_path / "drafter", config, tiny_eagle3.drafter_weights(config, seed=3))
    of_run = {"drafter.kind": "eagle3", "drafter.path": str(other)} if OTHERS[case] else {}
    with pytest.raises(
        ConfigError, match="but the engine at .* was started with an EAGLE-3 drafter on the inputs of"
    ) as error:
        attach(served, of_run, tmp_path)
    assert "\n" not in str(error.value)


@LLAMA
def test_a_run_uses_an_engine_with_its_drafter(served, tmp_path):
    own = {"drafter.kind": "eagle3", "drafter.path": str(served.folder / "drafter")}
    (engine,) = attach(served, own, tmp_path).wait().values()
    assert engine.describe()["eagle3"]["taps"] == [2, 4, 5]


def attach(served: Served, options: dict[str, str], run_dir: Path) -> ServedEngines:
    known = {"model.path": str(served.folder / "target"), "rollout.urls": served.engine.url}
    return ServedEngines(load(None, known | options), run_dir, GpuLayout())
