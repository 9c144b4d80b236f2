#!/usr/bin/env bash
# Qwen2.5-7B has no drafter: add one, warm it up on demonstrations, then train it with the policy.
#   rlspec convert --add-mtp …          a fresh drafter, of the family that SGLang runs for Qwen2 (see rlspec convert --help)
#   rlspec sft --sft.drafter_only true  until accept length is flat; then convert to Megatron's format for LOAD
# Drafts of an untrained drafter are never accepted, so speculation only costs time. Do not skip the warm-up.
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/qwen2.5-7B.sh"
launch --drafter.depth 3 --candidate-steps 0,1,2,3 -- \
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 4096 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --attention-backend flash --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7 "$@"
