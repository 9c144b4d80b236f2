"""The models that people try first, by their published config.json: accepted, named, counted, laid out."""

import math

import pytest
from published import BILLIONS, PUBLISHED, REFUSED
from train_ranks import config, on_ranks

from megatron_rlspec.models.config import CheckpointError, check_config
from megatron_rlspec.models.names import name_table
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.models.shapes import expected_shape
from megatron_rlspec.train import dry_run


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_add_up_to_the_models_parameters(name):
    typed = check_config(PUBLISHED[name], name)
    shapes = {hf: expected_shape(hf, typed) for hf in name_table(PUBLISHED[name]).by_hf}
    assert sum(math.prod(shape.values()) for shape in shapes.values()) / 1e9 == pytest.approx(BILLIONS[name], rel=5e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_named(name):
    config, reason = REFUSED[name]
    with pytest.raises(CheckpointError) as told:
        check_config(config, name)
    assert reason in str(told.value) and "\n" not in str(told.value)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # of Qwen2.5's model cards
SCALED = [("Llama-3.1-8B-Instruct", "llama3", {}), ("Llama-3.2-1B-Instruct", "llama3", {})]
SCALED += [("Qwen2.5-7B-Instruct", "yarn", YARN), ("Qwen3-8B", "yarn", YARN | {"beta_fast": 16, "beta_slow": 2})]


@pytest.mark.parametrize(("name", "kind", "scaling"), SCALED)
def test_frequencies_are_those_of_transformers(name, kind, scaling):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = PUBLISHED[name] | ({"rope_scaling": scaling, "max_position_embeddings": 131072} if scaling else {})
    typed = check_config(stated, name)
    plain = {key: value for key, value in stated.items() if key not in ("architectures", "model_type")}
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](AutoConfig.for_model(typed.model_type, **plain), "cpu")
    rope = Rope.of(stated)
    assert rope.magnitude == factor and rope.frequencies(2 * len(theirs)).tolist() == theirs.tolist()
    assert theirs[-1] == Rope(rope.base).frequencies(2 * len(theirs))[-1] / rope.factor


def laid_out(name):
    """Return the first line of `rlspec train --dry-run`, on ranks that do not exist."""
    parallel = {"tensor": 2, "expert": 8, "sequence": True} if "-A" in name else {"tensor": 2}
    options = config(model={"dtype": "bfloat16", "max_length": 4096}, parallel=parallel, drafter={"train": False})
    return list(dry_run.report(options, PUBLISHED[name], 16))[0]


LAID_OUT = ["Llama-3.2-1B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-30B-A3B", "Moonlight-16B-A3B-Instruct"]


@pytest.mark.parametrize("name", ["Qwen3-0.6B", *(pytest.param(name, marks=pytest.mark.slow) for name in LAID_OUT)])
def test_a_dry_run_lays_the_model_out(name):
    (line,) = on_ranks(1, laid_out, name)
    policy = int(line.split(": ")[1].split(" ")[0].replace(",", ""))
    assert policy / 1e9 == pytest.approx(BILLIONS[name], rel=5e-3)
