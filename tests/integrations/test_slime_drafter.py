"""The drafter inside slime equals that of our own loop on the same weights and samples; needs no slime checkout."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import test_eagle3_training as eagle3  # noqa: E402
from train_ranks import HF_CONFIG, config, on_ranks, samples  # noqa: E402

STEPS = (1, 2, 3)


def write_drafter(trainer, folder):
    """Write the EAGLE-3 drafter, rounded to float32, which the trainer then has, too, and config.json of its policy."""
    from megatron_rlspec.conversion.drafter_files import build_drafter
    from megatron_rlspec.models.hf_files import publish

    held = dict(trainer.export())
    own = {name: tensor.float() for name, tensor in held.items() if name.startswith("eagle3.")}
    trainer.load_hf(held | {name: tensor.double() for name, tensor in own.items()})
    target = Path(folder, "drafter")
    publish(build_drafter(target, eagle3.DRAFTER, own.items(), torch.from_numpy(eagle3.WORDS)), target)
    Path(folder, "config.json").write_text(json.dumps(HF_CONFIG))
    return str(target)


def check_read(drafter, folder):
    """What a checkpoint has of an EAGLE-3 drafter is read back."""
    folder.mkdir()
    drafter.write(folder, True)
    before = {name: p.detach().clone() for name, p in drafter.block.named_parameters()}
    with torch.no_grad():
        for parameter in drafter.block.parameters():
            parameter.zero_()
    drafter.read(folder)
    assert not [n for n, p in drafter.block.named_parameters() if not torch.equal(p, before[n])]


def own_and_slimes(loss, temperature, folder=None, train=True):
    """Train one step with each; return the drafter's gradients, metrics and predicted tokens per round.

    folder  to write an EAGLE-3 drafter to; None: the drafter is an MTP layer
    train   False: inside slime, the drafter is frozen
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_rlspec.cotrainer.fields import drafter_fields
    from megatron_rlspec.integrations.slime.batch import micro_batch, trained_tokens
    from megatron_rlspec.integrations.slime.drafter import SlimeMTP
    from megatron_rlspec.integrations.slime.eagle3 import SlimeEagle3
    from megatron_rlspec.integrations.slime.options import Options
    from megatron_rlspec.packing.pack import pack
    from megatron_rlspec.train import layer_specs
    from megatron_rlspec.train.model import describe
    from megatron_rlspec.train.step import Trainer

    options = config(
        drafter={"depth": 3, "loss": loss} | ({"kind": "eagle3", "path": "-"} if folder else {}),
        rollout={"temperature": temperature},
        spec={"mode": "adaptive", "candidate_steps": (0, *STEPS), "verifier": "target_only"},
    )
    trainer = Trainer(options, eagle3.HF if folder else HF_CONFIG)
    drafter = ""
    if folder:
        trainer.set_draft_vocabulary(eagle3.WORDS)
        drafter = write_drafter(trainer, folder)
    chosen = [
        replace(s, loss_mask=(torch.arange(len(s.tokens)) >= len(s.prompt.tokens)).float().numpy()) for s in samples(6)
    ]
    chosen = [s for s in chosen if len(s.prompt.tokens) < len(s.tokens)]
    batches = pack(chosen, depth=3, tokens_per_micro_batch=400, advantages=[0.0] * len(chosen))
    assert len(batches) == 1
    with torch.no_grad():
        packed = describe(batches[0], trainer.model_config, trainer.rope, trainer.device)
        hidden = trainer.policy(batches[0].tokens[None], batches[0].position_ids[None], None, packed_seq_params=packed)

    mtp = replace(trainer.model_config, mtp_num_layers=None if folder else 1, finalize_model_grads_func=None)
    model = GPTModel(
        config=mtp,
        transformer_layer_spec=layer_specs.decoder_spec(mtp),
        mtp_block_spec=None if folder else layer_specs.drafter_spec(mtp),
        vocab_size=HF_CONFIG["vocab_size"],
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
        rotary_base=trainer.rope.base,
    )
    weights = dict(trainer.policy.named_parameters()) | ({} if folder else dict(trainer.drafter.named_parameters()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    learns = {"loss": loss, "lr": 1e-2, "train": train}
    learns |= {"kind": "eagle3", "path": drafter} if folder else {}
    args = Namespace(
        rollout_temperature=temperature,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        clip_grad=0.0,
        rlspec={"drafter": learns, "candidate_steps": [0, *STEPS], "folder": "unused"},
        hf_checkpoint=folder,
        seed=1,
        offload_train=True,  # then what a push sends is copied after every step
    )
    given = Options.from_args(args)
    slimes = SlimeEagle3(model, given, args) if folder else SlimeMTP(model, given, args, HF_CONFIG)
    if not folder:  # of a critic, which is never made ready
        assert slimes._postprocess(lambda states, **_: states, hidden) is hidden
    slimes.make_ready()
    order = [int(i) for i in dict.fromkeys(batches[0].sequence_ids.tolist()) if i >= 0]
    laid_out = [chosen[i] for i in order]
    tokens = [torch.as_tensor(s.tokens) for s in laid_out]
    masks = [torch.as_tensor(s.loss_mask)[len(s.prompt.tokens) :] for s in laid_out]
    data = {"total_lengths": [len(t) for t in tokens], "loss_masks": masks}
    boundaries = SimpleNamespace(cu_seqlens_q=batches[0].cu_seqlens_padded)
    slimes.begin_step(trained_tokens(data, range(len(tokens)), 3))
    fields = {"unconcat_tokens": tokens, "loss_masks": masks, "packed_seq_params": boundaries}
    slimes.fields.append(drafter_fields(micro_batch(fields), 3, slimes.denominators))
    if folder:  # it learns within the policy's forward, in which it takes the states of several layers
        model(batches[0].tokens[None], batches[0].position_ids[None], None, packed_seq_params=packed)
        assert not [n for n, p in model.named_parameters() if p.grad is not None]
    else:
        slimes.on_hidden(hidden, slimes.fields.popleft())
    learnt = dict((slimes.block if folder else model).named_parameters())
    learnt = {n: p for n, p in learnt.items() if n.startswith(("mtp.", "eagle_module."))}
    before = {n: p.detach().clone() for n, p in learnt.items()}
    inside = {n: p.main_grad.clone() for n, p in learnt.items()} if train else {}
    metrics = slimes.end_step()
    changed = {n for n, p in learnt.items() if not torch.equal(p, before[n])}
    pushed = dict(slimes.tensors()) if folder else {}
    if folder:
        check_read(slimes, Path(folder, "saved"))

    gradients = {}
    step = trainer.drafter_learner.step

    def capture(*given, **named):
        gradients.update({n: p.main_grad.clone() for n, p in trainer.drafter.named_parameters()})
        return step(*given, **named)

    trainer.drafter_learner.step = capture
    own = trainer.train_step(batches, objective="grpo")
    gap = {n: float((g - gradients[n]).norm() / gradients[n].norm()) for n, g in inside.items()}
    losses = [(metrics[f"drafter_loss_{d}"], own[f"drafter/loss_{d}"]) for d in (1, 2, 3)]
    tokens_per_round = [(metrics[f"drafter_tokens_k{k}"], trainer.prediction.tokens_per_round(k)) for k in STEPS]
    expected = dict(trainer.export("drafter")) if folder else {}
    sent = {n: float((pushed[n] - tensor).abs().max()) for n, tensor in expected.items()}
    return gap, losses, tokens_per_round, sent, changed


@pytest.mark.parametrize(("loss", "temperature"), [("ce", 1.0), ("forward_kl", 0.7)])
def test_the_drafter_learns_and_predicts_at_the_rollouts_temperature(loss, temperature):
    ((gap, losses, tokens_per_round, _, changed),) = on_ranks(1, own_and_slimes, loss, temperature)
    assert max(gap.values()) < 1e-9 and changed == gap.keys()
    for inside, own in losses + tokens_per_round:
        assert inside == pytest.approx(own, rel=1e-9)


def test_an_eagle3_drafter_learns_as_in_our_own_loop_and_its_update_is_pushed(tmp_path):
    ((gap, losses, tokens_per_round, sent, changed),) = on_ranks(1, own_and_slimes, "forward_kl", 0.7, str(tmp_path))
    assert len(gap) == 10 and max(gap.values()) < 1e-9 and changed == gap.keys()
    for inside, own in losses + tokens_per_round:
        assert inside == pytest.approx(own, rel=1e-9)
    assert len(sent) == 13 and max(sent.values()) < 1e-9


@pytest.mark.parametrize("eagle3", [False, True])
def test_a_frozen_drafter_is_measured_and_stays(eagle3, tmp_path):
    given = ("forward_kl", 1.0, str(tmp_path) if eagle3 else None, False)
    ((gap, losses, tokens_per_round, _, changed),) = on_ranks(1, own_and_slimes, *given)
    assert not gap and not changed
    for inside, own in losses + tokens_per_round:
        assert inside == pytest.approx(own, rel=1e-9)


def test_a_rotary_base_that_is_not_the_models_is_refused():
    from megatron_rlspec.integrations.slime.drafter import SlimeMTP
    from megatron_rlspec.integrations.slime.options import Options

    sampling = {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1}
    args = Namespace(**sampling, clip_grad=0.0, rlspec={"drafter": {}, "candidate_steps": [0, 1], "folder": "unused"})
    nested = {"architectures": ["Some"], "text_config": {"rope_theta": 5e5}}
    model = SimpleNamespace(rotary_base=10000, _postprocess=None)
    with pytest.raises(ValueError, match="rope_theta=500000, but the model was built with --rotary-base 10000"):
        SlimeMTP(model, Options.from_args(args), args, nested)
