"""Megatron imports these. It calls them under `moe_router_fusion` alone."""


def fused_topk_with_score_function(
    logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
):
    raise NotImplementedError("moe_router_fusion")


def fused_compute_score_for_moe_aux_loss(logits, topk, score_function):
    raise NotImplementedError("moe_router_fusion")


def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
    raise NotImplementedError("moe_router_fusion")
