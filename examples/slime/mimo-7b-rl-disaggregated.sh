#!/usr/bin/env bash
# MiMo-7B-RL: 4 GPUs train and 4 generate. Weights are sent over NCCL. SGLang before 0.5.23 does not load them into the
# drafter. SGLang 0.5.23 refuses weights outside a session, and slime opens no session. The plugin handles both.
# For engines outside this cluster add --rollout-external-engine-addrs, and start them in the environment that is printed.
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/mimo-7B-rl.sh"
launch --drafter.depth 3 --drafter.lr 1e-4 --candidate-steps 0,1,2,3,5 -- \
  --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --attention-backend flash --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.85 \
  --sglang-attention-backend fa3 "$@"
