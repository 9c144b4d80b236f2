"""SGLang reads the ranges of `rlspec serve` as they are meant, for its own list of captured batch sizes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tiny_mimo

from megatron_rlspec.rollout.sglang.http import serve
from megatron_rlspec.rollout.sglang.scheduler import decisions
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation import graphs
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

STEPS = (0, 1, 2, 3, 5)
MODEL = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=160)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 36}))
    return folder


def asked(folder: Path, *more: str) -> tuple[list[str], dict]:
    options = serve.parser().parse_args(["--model", str(folder), *more])
    arguments, _, slots = serve.arguments_for(options, "cuda")
    return arguments, slots


def steps_at(slots: dict, batch: int) -> list[int]:
    return slots[str(max(int(start) for start in slots if int(start) <= batch))]["candidate_steps"]


def test_a_fixed_number_of_drafts_is_captured_at_every_batch_and_a_rule_starts_with_the_least(files: Path) -> None:
    arguments, slots = asked(files, "--spec", "fixed", "--num-steps", "3")
    assert "--speculative-num-steps=3" in arguments and 3 in steps_at(slots, 256)
    arguments, slots = asked(files, "--num-steps", "3")
    assert "--speculative-num-steps=1" in arguments and steps_at(slots, 1) == list(STEPS)
    settings = serve.arguments_for(serve.parser().parse_args(["--model", str(files)]), "cuda")[1]
    assert settings.num_steps is None, "the engine makes a rule of its model's config.json"
    assert 1 in steps_at(slots, 256) and 5 not in steps_at(slots, 256) and 5 in steps_at(slots, 64)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (("--spec", "fixed", "--num-steps", "2"), [SpecConfig(2)]),
        (("--candidate-steps", "1,3"), [SpecConfig(1), SpecConfig(3)]),
        (("--candidate-steps", "0,3"), [OFF, SpecConfig(0), SpecConfig(3)]),
    ],
)
def test_every_engine_that_drafts_can_be_held_and_no_rule_gets_a_choice_by_that(
    files: Path, given: tuple[str, ...], chosen: list[SpecConfig]
) -> None:
    _, settings, slots = serve.arguments_for(serve.parser().parse_args(["--model", str(files), *given]), "cuda")
    assert all(steps_at(slots, batch)[0] == 0 for batch in range(1, 257))
    decider = decisions.Decider(settings)
    decider.start(steps_at(slots, 1), MODEL)
    assert decider.candidates == chosen
    with pytest.raises(ValueError, match="cannot run off") if OFF not in chosen else nullcontext():
        decider.set_config(OFF)
    decider.set_config(chosen[-1])
    decider.hold("a bad push")
    assert decider.choose(4, 100, lambda n: 0)[0] == OFF
    decider.why_held = ""
    assert decider.choose(4, 100, lambda n: 0)[0] == chosen[-1]


def test_sglang_captures_the_ranges(sglang_models: ModuleType, files: Path, tmp_path: Path) -> None:
    from sglang.srt.arg_groups import cuda_graph_hook
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    given = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="EAGLE")
    for most in (24, 160, 256, 512):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_graph_hook, "resolving_view", lambda _: given)
            sizes = cuda_graph_hook.generate_decode_cuda_graph_batch_sizes(None, most)
        assert sorted(sizes) == graphs.graph_sizes(most)
    _, slots = asked(files)
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(slots))
    params = AdaptiveSpeculativeParams(initial_steps=1, cfg_path=str(path))
    params.set_cuda_graph_bs(graphs.graph_sizes(256))
    captured = {steps: params.cuda_graph_bs_for_step(steps) for steps in STEPS}
    for steps, sizes in captured.items():
        assert sorted(sizes) == [size for size in graphs.graph_sizes(256) if steps in steps_at(slots, size)]

    decider = decisions.Decider(Settings("target_only"))
    decider.start(params.candidate_steps, MODEL)
    decider.replace({"roofline": Roofline.of_layers(36).to_json()})
    decider.limit(captured, start=1)
    assert decider._largest_batch and max(decider._largest_batch) == SpecConfig(5) and OFF not in decider._largest_batch
    for batch in range(1, 257):
        decider.rule.acceptance.predict([0.99] * 5)
        config, _ = decider.choose(batch, 128 * batch, lambda n: 0)
        padded = next(size for size in graphs.graph_sizes(256) if size >= batch)
        assert config.num_steps == 1 or padded in captured[config.num_steps]
    decider.limit(dict.fromkeys(STEPS), start=1)  # without graphs nothing is limited
    assert decider._largest_batch == {}
