"""Megatron imports these. It calls them under `moe_router_fusion` alone."""

fused_topk_with_score_function = None
fused_compute_score_for_moe_aux_loss = None
fused_moe_aux_loss = None
