"""The models that people try first, by their published config.json: accepted, named, counted, laid out, trained."""

import math

import pytest
from published import BILLIONS, PUBLISHED, REFUSED
from test_pushed_families import checkpoint
from train_ranks import batches, config, on_ranks, samples

from megatron_rlspec.models.config import CheckpointError, check_config
from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import read_hf, write_hf
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


NARROW = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 64},
    **{"max_window_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **{"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"first_k_dense_replace": 1, "torch_dtype": "float32"},
}
STORED_TWICE = ("Qwen3-0.6B", "Qwen3-1.7B")  # their files hold the tied head beside the embedding
ARCHITECTURES = sorted({stated["architectures"][0] for stated in PUBLISHED.values()})


def narrowed(stated):
    """Return a published config.json with fewer and narrower layers, and every other key."""
    found = stated | {key: value for key, value in NARROW.items() if stated.get(key) is not None}
    grouped = stated["num_key_value_heads"] < stated["num_attention_heads"]
    found |= {"num_hidden_layers": 2, "num_key_value_heads": 2 if grouped else 4}
    if stated.get("n_group", 1) > 1:
        found |= {"n_group": 2, "topk_group": 1}
    return found


def write(name, folder):
    stated = narrowed(PUBLISHED[name])
    known = {"model_type": "qwen2"} if stated["model_type"] == "mimo" else {}  # Transformers has no class for it
    tensors = checkpoint({"attention_bias": None, **stated, **known}, folder / "names")
    if name in STORED_TWICE:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_hf(folder / name, stated, tensors)
    return folder / name


def steps(architecture, folder):
    """Return metrics of a step, and the tensors that it left as they were, for each model of an architecture."""
    from megatron_rlspec.train.step import Trainer

    found = {}
    for name in (name for name in PUBLISHED if PUBLISHED[name]["architectures"] == [architecture]):
        path = write(name, folder)
        drafts = bool(PUBLISHED[name].get("num_nextn_predict_layers"))
        hf_config = check_model(path, "train", drafter=drafts, tokenizer=False)
        trainer = Trainer(config(model={"dtype": "float32"}, drafter={"train": drafts}), hf_config)
        trainer.load_hf(read_hf(path)[1])
        before = dict(trainer.export())
        share = batches(samples(8), trainer.config)
        metrics = trainer.train_step(share, objective="grpo")
        kept = [tensor for tensor, value in trainer.export() if value.equal(before[tensor])]
        found[name] = metrics, kept, drafts
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_takes_a_step(architecture, tmp_path):
    (found,) = on_ranks(1, steps, architecture, tmp_path)
    for name, (metrics, kept, drafts) in found.items():
        norms = [metrics["policy/grad_norm"], *([metrics["drafter/grad_norm"]] if drafts else [])]
        assert all(0 < norm < math.inf for norm in norms) and not metrics["policy/skipped"], (name, metrics)
        untrained = ("correction_bias", ".experts.")  # a bias by counts; an expert without a token
        assert not [tensor for tensor in kept if not any(word in tensor for word in untrained)], name
