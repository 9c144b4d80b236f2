"""A push of changed weights to a real engine, for every family whose record says `served`.

Before and after the push, the engine's log-probs equal Transformers', its fingerprints equal the trainer's, and its
accept length is that of the drafter that it received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_model_parity import YARN
from test_pushed_families import checkpoint, config_of
from torch import Tensor

from megatron_rlspec.models.families import FAMILIES, names_where
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.models.names import name_table
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.types import OFF, Prompt, Request, Sample, Sampling, SpecConfig

SERVED = {name: config_of(name, bos_token_id=1, eos_token_id=2) for name in names_where(lambda record: record.served)}
# On a CPU, SGLang takes hidden_size / heads for the head size of these classes.
for name in ("MiMoForCausalLM", "Qwen2ForCausalLM"):
    SERVED[name] |= {"head_dim": 8}
SERVED["MiMoForCausalLM YaRN"] = {**SERVED["MiMoForCausalLM"], "rope_scaling": YARN}
SERVED["LlamaForCausalLM, tied"] = {**SERVED["LlamaForCausalLM"], "tie_word_embeddings": True}
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "8"]
TEMPERATURE = 0.8
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", params=list(SERVED))
def served_model(request, tmp_path_factory) -> Iterator[tuple[SGLangEngine, dict[str, Any], Tensors]]:
    config = SERVED[request.param]
    architecture = config["architectures"][0]
    folder = tmp_path_factory.mktemp(architecture)
    tensors = checkpoint(config, folder / "names")
    write_hf(folder / "model", config, {name: tensor.clone() for name, tensor in tensors.items()})
    drafts = ["--spec", "adaptive", "--candidate-steps", "0,1,2,3"] if FAMILIES[architecture].sglang_drafter else []
    arguments = [*SERVE, *(drafts or ["--spec", "off"])]
    with launch(folder / "model", folder / "log", arguments=arguments) as process:
        yield SGLangEngine.of(process.wait(180), timeout=120), config, tensors


def drawn(engine: SGLangEngine, temperature: float = TEMPERATURE) -> list[Sample]:
    asked = [Request(f"r{i}.", Prompt(i, np.arange(3, 8 + i)), seed=i) for i in range(4)]
    return engine.generate(asked, Sampling(temperature=temperature, max_new_tokens=24, ignore_eos=True))


def agrees_with_transformers(samples: Sequence[Sample], config: dict[str, Any], tensors: Tensors, folder: Path) -> None:
    """Compare log-probs with Transformers' own class, loaded from the target's tensors alone."""
    target = {name: tensors[name].clone() for name in name_table(config).target_names}
    write_hf(folder, {**config, "num_nextn_predict_layers": 0}, target)
    known = transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k != "architectures"})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=known, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for sample in samples:
        with torch.no_grad():
            logits = oracle(torch.from_numpy(sample.tokens)[None]).logits[0, :-1]
        expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, torch.from_numpy(sample.tokens[1:, None]))
        start = sample.prompt_len
        np.testing.assert_allclose(sample.behaviour_logprobs[start:], expected[start - 1 :, 0], atol=5e-4)


def agreeing(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Return a target without context, and a drafter that computes the same at every depth.

    With outputs of attention and experts at zero the target's logits are head(norm(embedding of x_t)).
    """
    table = name_table(config)
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in found:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name].zero_()
    hidden = config["hidden_size"]
    halves = (torch.eye(hidden), torch.zeros(hidden, hidden))
    (enorm,) = table.row("mtp.layers.0.enorm.weight").hf
    (final,) = table.row("mtp.layers.0.final_layernorm.weight").hf
    row = table.row("mtp.layers.0.eh_proj.weight")
    found[enorm].fill_(1)
    found[final] = found["model.norm.weight"].clone()
    found[row.hf[0]] = row.layout.split(torch.cat(halves, dim=1))[0].contiguous()
    return found


@pytest.mark.slow
def test_a_push_changes_what_the_engine_computes(served_model, tmp_path):
    engine, config, old = served_model
    drafts = bool(FAMILIES[config["architectures"][0]].sglang_drafter)
    assert engine.describe()["unnamed"] == ""
    if drafts:
        engine.set_config(SpecConfig(3))
    assert engine.fingerprints() == {name: fingerprint(tensor) for name, tensor in old.items()}
    agrees_with_transformers(drawn(engine), config, old, tmp_path / "old")

    new = checkpoint(config, tmp_path / "names", seed=1)
    pusher = Pusher({"e": engine})
    assert not pusher.push(1, lambda scope: new.items()).failed
    samples = drawn(engine)
    assert {version for sample in samples for version, _, _ in sample.policy_versions} == {1}
    agrees_with_transformers(samples, config, new, tmp_path / "new")
    if not drafts:
        wakes(engine, pusher, new)
        return
    engine.set_config(OFF)
    plain = drawn(engine)
    assert [sample.tokens.tolist() for sample in plain] == [sample.tokens.tolist() for sample in samples]

    good = agreeing(new, config)
    own = set(name_table(config).drafter_names)
    engine.set_config(SpecConfig(3))
    assert not pusher.push(2, lambda scope: [(n, t) for n, t in good.items() if n not in own], "target").failed
    random = accept_length(pooled(sample.accepted for sample in drawn(engine, 0.0)))
    assert not pusher.push(3, lambda scope: [(n, t) for n, t in good.items() if n in own], "drafter").failed
    trained = accept_length(pooled(sample.accepted for sample in drawn(engine, 0.0)))
    print(f"accept length: random drafter {random:.2f}, agreeing drafter {trained:.2f}")
    assert random < 1.5 and trained > 3
    agrees_with_transformers(drawn(engine), config, good, tmp_path / "good")

    expert = next(name for name in sorted(own) if ".experts.5.up_proj" in name) if "experts" in str(own) else ""
    for name in filter(None, (expert, "model.layers.1.self_attn.o_proj.weight")):
        wrong = {**good, name: old[name]}
        engine.update_weights(4, wrong.items())
        assert pusher.compare_with(pusher.engines["e"]).differing == (name,)
    assert not pusher.push(5, lambda scope: old.items()).failed
    wakes(engine, pusher, old)


def wakes(engine: SGLangEngine, pusher: Pusher, tensors: Tensors) -> None:
    """Have an engine sleep and wake: a push of what a trainer has is complete, one that lacks a tensor is not."""
    before = [sample.tokens.tolist() for sample in drawn(engine)]
    engine.sleep()
    engine.wake()
    some = dict(list(tensors.items())[1:])
    assert pusher.push(6, lambda scope: some.items()).failed
    assert not pusher.push(7, lambda scope: tensors.items()).failed and pusher.compare_with(pusher.engines["e"]).empty
    assert [sample.tokens.tolist() for sample in drawn(engine)] == before
