"""During a training step the host waits for the GPU in these places only; in none of a micro-batch.

A wait in a micro-batch leaves the GPU idle until the host has launched the next kernels. What Transformer Engine's
layers do is not seen here: attention, norms and rotary embedding are those of the local layer specs.
"""

from collections import Counter

from host_reads import GPU, HostReads
from test_attention import FLASH
from train_ranks import HF_CONFIG, batches, config, on_ranks, samples

# What waits, how often, and why it may. A new line needs a reason of its own.
A_MICRO_BATCH: dict[str, int] = {}
A_STEP = {
    # The host follows the rounds of the predicted acceptance. It waits for the sums next, so nothing is lost.
    "megatron_rlspec/train/drafter_step.py:follow_rounds: copy to the CPU": 1,
    # The sums decide whether the policy may be updated (a loss that is not finite, a gap to the engines).
    "megatron_rlspec/train/objectives.py:sum_over_replicas: copy to the CPU": 1,
    # The norms of policy and drafter decide whether each is updated, and are metrics.
    "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32: item": 2,
    # Megatron's norm without Transformer Engine or Apex.
    "megatron/core/utils.py:local_multi_tensor_l2_norm: waiting copy to the GPU": 2,
}
# The zeros that autograd makes for an output without gradient come from C++, which does not say on which device.
MISPLACED = {"megatron_rlspec/losses/choice.py:policy_gradient: mul_"}


def waits(kind: str) -> list[tuple[Counter[str], Counter[str]]]:
    """Return where the host waits in a step of two and in one of three micro-batches."""
    from megatron_rlspec.train import runtime
    from megatron_rlspec.train.step import Trainer

    cfg = config(model={"dtype": "bfloat16"}, drafter={"loss": kind})
    runtime.init_distributed(cfg.parallel, 1)
    runtime.device = lambda: GPU
    found = []
    with HostReads(operators=FLASH) as reads:
        trainer = Trainer(cfg, HF_CONFIG)
        micro_batches = batches(samples(24), cfg)
        trainer.train_step(micro_batches[:1], objective="grpo")  # the first step compares the kernels with plain torch
        for count in (2, 3):
            reads.found.clear()
            metrics = trainer.train_step(micro_batches[:count], objective="grpo")
            assert metrics["drafter/tokens_3"] > 0 and trainer.prediction is not None
            found.append((reads.found.copy(), reads.misplaced.copy()))
    return found


def test_the_host_waits_nowhere_else():
    (((two, _), (three, misplaced)),) = on_ranks(1, waits, "forward_kl")
    each = three - two
    assert dict(each) == A_MICRO_BATCH
    assert two - each - each == Counter(A_STEP)
    assert set(misplaced) <= MISPLACED
