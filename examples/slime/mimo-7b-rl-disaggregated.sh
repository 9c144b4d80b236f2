#!/usr/bin/env bash
# MiMo-7B-RL, 4 GPUs train and 4 generate; weights travel over NCCL. SGLang before 0.5.23 would leave the drafter as it
# was: `rlspec slime` sets RLSPEC_SGLANG_DRAFTER_PUSH, and the plugin loads what arrived into the drafter as well.
# Engines outside this cluster: add --rollout-external-engine-addrs, and set that variable where they are started.
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/mimo-7B-rl.sh"
launch --drafter.depth 3 --candidate-steps 0,1,2,3,5 -- \
  --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --attention-backend flash --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.85 \
  --sglang-attention-backend fa3 "$@"
