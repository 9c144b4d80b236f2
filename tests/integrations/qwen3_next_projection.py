"""Print how far SGLang's Qwen3-Next drafter is from the one that slime's Megatron trains.

It is the norm of the difference of one token's projection. slime's converter swaps the halves of `eh_proj`,
although Megatron and SGLang read [embedding, hidden] in one order; patch 0001 takes the swap out.
"""

from types import SimpleNamespace

import torch

from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.rollout.sglang.cpu import stand_ins
from megatron_rlspec.train import runtime, without_cuda

if not torch.cuda.is_available():
    stand_ins.install()

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer  # noqa: E402
from sglang.srt.models.qwen3_next_mtp import Qwen3NextForCausalLMMTP  # noqa: E402
from slime.backends.megatron_utils.megatron_to_hf.qwen3_next import convert_qwen3_next_to_hf  # noqa: E402

HIDDEN = 4


def sglang(fc, embedding, hidden):
    drafter = SimpleNamespace(
        quant_config=None,
        pre_fc_norm_embedding=lambda x: x,
        pre_fc_norm_hidden=lambda x: x,
        fc=lambda x: x @ fc.T,
        model=lambda ids, positions, batch, states: states,
        logits_processor=lambda ids, states, head, batch: states,
        lm_head=None,
    )
    spec = SimpleNamespace(hidden_states=hidden[None])
    batch = SimpleNamespace(spec_info=spec, forward_mode=SimpleNamespace(is_idle=lambda: False))
    return Qwen3NextForCausalLMMTP.forward(drafter, None, None, batch, input_embeds=embedding[None])[0]


def megatron(weight, embedding, hidden):
    layer = SimpleNamespace(
        enorm=lambda x: x, hnorm=lambda x: x, eh_proj=lambda x: (x @ weight.T, None), sequence_parallel=False
    )
    return MultiTokenPredictionLayer._concat_embeddings(layer, hidden[None, None], embedding[None, None])[0, 0]


without_cuda.install()
runtime.init_distributed(ParallelConfig())
generator = torch.Generator().manual_seed(0)
weight, e, h = (torch.randn(*shape, generator=generator) for shape in ((HIDDEN, 2 * HIDDEN), (HIDDEN,), (HIDDEN,)))
((_, fc),) = convert_qwen3_next_to_hf(SimpleNamespace(), "module.module.mtp.layers.0.eh_proj.weight", weight)
print(float((sglang(fc, e, h) - megatron(weight, e, h)).norm()))
runtime.shut_down()
