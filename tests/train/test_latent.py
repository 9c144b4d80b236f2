"""DeepSeek-V3 in the trainer: latent attention equals Transformers' in policy and drafter, and all layouts agree."""

import pytest
import torch
from moe_oracles import DEEPSEEK_V3, chains, checkpoint
from test_expert_parallel import CLOSE, far, trained
from test_experts import against_transformers, build, check_isolation, data_of, isolation
from test_model_parity import YARN, drafter_logits
from train_ranks import on_ranks

from megatron_rlspec.config import ConfigError
from megatron_rlspec.models.config import check_config

# The scores are multiplied by 1.2.
SCALED = DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "v_head_dim": 12}
SMALL = SCALED | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}


@pytest.mark.parametrize("hf", [DEEPSEEK_V3 | {"q_lora_rank": None}, SCALED], ids=["DeepseekV3ForCausalLM", "scaled"])
def test_policy_and_drafter_equal_transformers(hf, tmp_path):
    ((worst, same),) = on_ranks(1, against_transformers, hf, tmp_path)
    assert max(worst) < 2e-5
    assert same


def against_chains(folder):
    """Return our drafter's largest difference from Transformers' layer by depth, and the size of its logits."""
    tensors = checkpoint(SMALL, folder)
    trainer = build(SMALL, model={}, drafter={"depth": 3})
    trainer.load_hf(tensors)
    batch = data_of(trainer)[0]
    hidden, drafted = drafter_logits(trainer, batch)
    worst = torch.zeros(3)
    for start, end in zip(batch.cu_seqlens_padded[:3].tolist(), batch.cu_seqlens_padded[1:4].tolist(), strict=True):
        end = min(end, start + 16)
        theirs = chains(SMALL, tensors, batch.tokens[start:end], hidden[start:end], folder / str(start))
        ours = torch.stack([logits[start : end - 3] for logits in drafted])
        worst = torch.maximum(worst, (ours - theirs).abs().amax((1, 2)))
    return worst.tolist(), float(theirs.abs().max())


def test_every_depth_drafts_as_an_engine_does(tmp_path):
    ((worst, size),) = on_ranks(1, against_chains, tmp_path)
    assert max(worst) < 2e-5 and size > 0.1


def test_policy_is_the_same_with_and_without_drafter():
    check_isolation(on_ranks(3, isolation, SMALL))


LAYOUTS = {
    "tensor": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "expert": {"expert": 2},
}


def trained_in(weights, names):
    model = {"dtype": "float64"}  # padding is routed, too, so no loss balances the experts
    return {name: trained(weights, LAYOUTS.get(name, {}), hf=SMALL, model=model) for name in names}


@pytest.mark.slow
def test_layouts_learn_as_one_rank(tmp_path):
    """Also the gradient of the keys' rotated part, which the heads of both tensor-parallel ranks share."""
    weights = {name: tensor.double() for name, tensor in checkpoint(SMALL, tmp_path).items()}
    (alone,) = on_ranks(1, trained_in, weights, ["one"])
    ranks = on_ranks(2, trained_in, weights, list(LAYOUTS))
    for name in LAYOUTS:
        found, wanted = ranks[0][name], alone["one"]
        for ours, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=CLOSE, abs=CLOSE), name
        assert far(found["exported"], wanted["exported"]) < CLOSE, name
        assert far(found["exported"], found["loaded"]) > 1e-3, "nothing was learnt"


def test_a_factor_on_cosine_and_sine_is_refused_in_one_line():
    scaling = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    with pytest.raises(ConfigError) as error:
        check_config(DEEPSEEK_V3 | {"rope_scaling": scaling}, "here")
    assert "mscale=1: expected the same as" in str(error.value) and "\n" not in str(error.value)
