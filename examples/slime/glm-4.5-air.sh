#!/usr/bin/env bash
# GLM-4.5-Air (106B, 12B active) on 8 machines of 8 GPUs. Its drafter is a mixture of experts. It is trained at depth 1,
# with Megatron's own attention. Engines may draft more steps with it, at falling acceptance.
# Each verified token activates experts of its own, so few steps are allowed.
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/glm4.5-106B-A12B.sh"
launch --drafter.depth 1 --drafter.lr 1e-4 --candidate-steps 0,1,2 -- \
  --sglang-speculative-num-steps 1 \
  --actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512 --rollout-max-response-len 8192 \
  --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --context-parallel-size 2 \
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
  --attention-backend flash --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 "$@"
