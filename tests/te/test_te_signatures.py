"""The stand-in has Transformer Engine's names and keywords, and Megatron finds the same names in both."""

import json
import sys

import contracts
import pytest
import te_signatures
from te_signatures import VERSION, has, imports, names

RECORD = json.loads(te_signatures.RECORD.read_text())
OURS = contracts.installed([str(te_signatures.STAND_IN)])
# What megatron-core imports, the real one has and the stand-in lacks, by what would use it. Each is imported in a
# `try` or inside a function, and none of our options leads there.
LEFT_OUT = {
    "FP8 and FP4": (
        "common.recipe.NVFP4BlockScaling",
        "pytorch.Fp8Padding",
        "pytorch.Fp8Unpadding",
        "pytorch.float8_tensor.Float8Tensor",
        "pytorch.fp8_model_init",
        "pytorch.quantized_model_init",
        "pytorch.tensor.float8_blockwise_tensor.Float8BlockwiseQTensor",
        "pytorch.tensor.float8_tensor.Float8Tensor",
        "pytorch.tensor.mxfp8_tensor.MXFP8Tensor",
        "pytorch.tensor.nvfp4_tensor.NVFP4Tensor",
        "pytorch.tensor.utils.cast_master_weights_to_fp8",
        "pytorch.tensor.utils.post_all_gather_processing",
        "pytorch.tensor.utils.replace_raw_data",
    ),
    "CUDA graphs of layers": (
        "pytorch.distributed.is_fp8_activation_recompute_enabled",
        "pytorch.graph.make_graphed_callables",
        "pytorch.graph.restore_fp8_tensors",
        "pytorch.graph.save_fp8_tensors",
        "pytorch.graph.set_capture_end",
        "pytorch.graph.set_capture_start",
        "pytorch.utils.make_weak_ref",
    ),
    "moe_permute_fusion": (
        "pytorch.permutation.moe_permute",
        "pytorch.permutation.moe_permute_with_probs",
        "pytorch.permutation.moe_sort_chunks_by_index",
        "pytorch.permutation.moe_sort_chunks_by_index_with_probs",
        "pytorch.permutation.moe_unpermute",
    ),
    "the fused cross entropy: our losses are our own": ("pytorch.cross_entropy.parallel_cross_entropy",),
    "fused_single_qkv_rope": ("pytorch.attention.rope.apply_fused_qkv_rotary_pos_emb",),
    "offloading": ("pytorch.cpu_offload_v1",),
    "megatron's inference engine": (
        "pytorch.constants.TE_DType",
        "pytorch.distributed.gather_along_first_dim",
        "pytorch.distributed.reduce_scatter_along_first_dim",
    ),
    "te_general_gemm, beside get_workspace, which 2.11 lacks": ("pytorch.cpp_extensions.general_gemm",),
}


def positions(text):
    """Return the names of the parameters, and of those without a default."""
    found = contracts.signature("m.f", {"m": f"def f{text}: ..."}.get).parameters
    required = [p for p in found.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return list(found), [p.name for p in required]


def unlike(ours, theirs):
    """Return why a call that fits our signature may not fit theirs; "" if it always fits."""
    (own, _), (known, required) = positions(ours), positions(theirs)
    open_ended = "kwargs" in known
    unknown = [name for name in own if name not in known and not open_ended]
    if unknown:
        return f"{unknown} not in {theirs}"
    if missing := set(required) - set(own):
        return f"{missing} not in ours"
    shared = [name for name in known if name in own]
    return "" if shared == [name for name in own if name in known] else f"another order than {theirs}"


@pytest.mark.parametrize("version", RECORD)
def test_the_stand_in_has_transformer_engines_names_and_keywords(version):
    """If it fails, run python tests/te/te_signatures.py TRANSFORMER_ENGINE_CHECKOUT and read what changed."""
    known = RECORD[VERSION]["signatures"] | RECORD[version]["signatures"]
    assert sorted(known) == sorted(names())
    assert all(known[name] is not None for name in names() if name.endswith("extra_state"))
    ours = te_signatures.signatures(OURS)
    wrong = {
        name: ours[name] or "missing"
        for name in names()
        if ours[name] is None or known[name] is None or (known[name] and unlike(ours[name], known[name]))
    }
    assert not wrong


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="recorded from the megatron-core of Python 3.11's lock")
def test_megatron_finds_the_same_names_in_the_stand_in():
    real = RECORD[VERSION]["imports"]
    assert sorted(real) == imports(), "another megatron-core: record again"
    left_out = {f"transformer_engine.{name}" for group in LEFT_OUT.values() for name in group}
    answers = {name: has(name, OURS) for name in real}
    assert {name for name, found in real.items() if found and not answers[name]} == left_out
    assert not {name for name, found in real.items() if answers[name] and not found}
