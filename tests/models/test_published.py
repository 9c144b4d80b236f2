"""The models that people try first, by their published config.json: accepted, named, laid out, counted."""

import pytest
from published import PUBLISHED
from train_ranks import config, on_ranks

from megatron_rlspec.models.config import check_config
from megatron_rlspec.models.names import name_table
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.train import dry_run


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_accepted_and_named(name):
    check_config(PUBLISHED[name], name)
    assert bool(name_table(PUBLISHED[name]).drafter_names) == bool(PUBLISHED[name].get("num_nextn_predict_layers"))


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # of Qwen2.5's model cards
SCALED = [
    ("Llama-3.2-1B-Instruct", "llama3", {}),
    ("Qwen2.5-7B-Instruct", "yarn", YARN),
    ("Qwen3-8B", "yarn", YARN | {"beta_fast": 16, "beta_slow": 2}),
]


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


# billions of parameters by model cards and the Hub
LAID_OUT = [
    ("Qwen3-0.6B", 0.596),
    pytest.param("Qwen3-30B-A3B", 30.5, marks=pytest.mark.slow),
    pytest.param("Moonlight-16B-A3B-Instruct", 15.96, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "billions"), LAID_OUT)
def test_a_dry_run_lays_the_model_out(name, billions):
    (line,) = on_ranks(1, laid_out, name)
    policy = int(line.split(": ")[1].split(" ")[0].replace(",", ""))
    assert policy / 1e9 == pytest.approx(billions, rel=5e-3)
