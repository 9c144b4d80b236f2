"""The drafter inside slime equals that of our own loop on the same weights and samples; needs no slime checkout."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from train_ranks import HF_CONFIG, config, on_ranks, samples  # noqa: E402

STEPS = (1, 2, 3)


def own_and_slimes(loss, temperature):
    """Train one step with each; return the drafter's gradients, metrics and predicted tokens per round."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_rlspec.integrations.slime.batch import drafter_fields, trained_tokens
    from megatron_rlspec.integrations.slime.drafter import Options, SlimeDrafter
    from megatron_rlspec.packing.pack import pack
    from megatron_rlspec.train import runtime
    from megatron_rlspec.train.model import describe
    from megatron_rlspec.train.step import Trainer

    options = config(
        drafter={"depth": 3, "loss": loss, "clip_grad": 0.0},
        rollout={"temperature": temperature},
        spec={"mode": "adaptive", "candidate_steps": (0, *STEPS), "verifier": "target_only"},
    )
    trainer = Trainer(options, HF_CONFIG)
    chosen = [
        replace(s, loss_mask=(torch.arange(len(s.tokens)) >= len(s.prompt.tokens)).float().numpy()) for s in samples(6)
    ]
    chosen = [s for s in chosen if len(s.prompt.tokens) < len(s.tokens)]
    shares = [0.5 + i / 4 for i in range(len(chosen))]
    batches = pack(chosen, depth=3, tokens_per_micro_batch=400, advantages=[0.0] * len(chosen), drafter_weights=shares)
    assert len(batches) == 1
    with torch.no_grad():
        packed = describe(batches[0], trainer.model_config, trainer.rope, trainer.device)
        hidden = trainer.policy(batches[0].tokens[None], batches[0].position_ids[None], None, packed_seq_params=packed)

    mtp = replace(trainer.model_config, mtp_num_layers=1, finalize_model_grads_func=None)
    model = GPTModel(
        config=mtp,
        transformer_layer_spec=runtime.decoder_spec(mtp),
        mtp_block_spec=runtime.drafter_spec(mtp),
        vocab_size=HF_CONFIG["vocab_size"],
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
        rotary_base=trainer.rope.base,
    )
    weights = dict(trainer.policy.named_parameters()) | dict(trainer.drafter.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    args = Namespace(
        rollout_temperature=temperature,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rlspec_depth=3,
        rlspec_loss=loss,
        rlspec_lr=1e-2,
        rlspec_clip_grad=0.0,
        rlspec_update_every=2,
        rlspec_zero_first_embedding=True,
        rlspec_candidate_steps=[0, *STEPS],
    )
    slimes = SlimeDrafter(model, Options.from_args(args))
    slimes.thaw()
    order = [int(i) for i in dict.fromkeys(batches[0].sequence_ids.tolist()) if i >= 0]
    laid_out = [chosen[i] for i in order]
    tokens = [torch.as_tensor(s.tokens) for s in laid_out]
    masks = [torch.as_tensor(s.loss_mask)[len(s.prompt.tokens) :] for s in laid_out]
    data = {"total_lengths": [len(t) for t in tokens], "loss_masks": masks}
    boundaries = SimpleNamespace(cu_seqlens_q=batches[0].cu_seqlens_padded)
    shares = [shares[i] for i in order]
    counts = trained_tokens(data, range(len(tokens)), 3, shares)
    slimes.begin(counts)
    fields = {"unconcat_tokens": tokens, "loss_masks": masks, "packed_seq_params": boundaries}
    slimes.fields = drafter_fields(fields, 3, 0, 1, weights=shares)
    slimes._learn(hidden, {})
    inside = {n: p.main_grad.clone() for n, p in model.named_parameters() if n.startswith("mtp.")}
    metrics = slimes.step()
    slimes.begin(counts)
    assert not slimes.due and slimes.step() == {}  # update_every=2
    slimes.begin(counts)
    assert slimes.due

    gradients = {}
    step = trainer.drafter_learner.step

    def capture(*given, **named):
        gradients.update({n: p.main_grad.clone() for n, p in trainer.drafter.named_parameters()})
        return step(*given, **named)

    trainer.drafter_learner.step = capture
    own = trainer.train_step(batches, objective="grpo")
    gap = {n: float((inside[n] - g).norm() / g.norm()) for n, g in gradients.items()}
    losses = [(metrics[f"drafter_loss_{d}"], own[f"drafter/loss_{d}"]) for d in (1, 2, 3)]
    tokens_per_round = [(metrics[f"drafter_tokens_k{k}"], trainer.prediction.tokens_per_round(k)) for k in STEPS]
    return gap, losses, tokens_per_round


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss", ["ce", "forward_kl"])
def test_the_drafter_learns_and_predicts_at_the_rollouts_temperature(loss, temperature):
    ((gap, losses, tokens_per_round),) = on_ranks(1, own_and_slimes, loss, temperature)
    assert max(gap.values()) < 1e-9
    for inside, own in losses + tokens_per_round:
        assert inside == pytest.approx(own, rel=1e-9)
