"""Each of the published models takes a step: narrow, of two layers, from files as Transformers names their tensors."""

import math

import pytest
from published import PUBLISHED
from test_pushed_families import checkpoint
from train_ranks import batches, config, on_ranks, samples

from megatron_rlspec.models.directory import check_model
from megatron_rlspec.models.hf_files import read_hf, write_hf

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
