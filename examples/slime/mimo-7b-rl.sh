#!/usr/bin/env bash
# MiMo-7B-RL on one machine of 8 GPUs, which training and engines use in turn. This is slime's own speculative recipe with
# `rlspec slime` in front. The checkpoint has a drafter. Training unrolls it by three steps, as the engine does.
# Engines stop drafting where it does not pay: hundreds of requests an engine with short contexts. With contexts of
# thousands of tokens drafts should pay at hundreds of requests, too (an estimate).
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/mimo-7B-rl.sh"
launch --drafter.depth 3 --drafter.lr 1e-4 --candidate-steps 0,1,2,3,5 -- \
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --attention-backend flash --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7 \
  --sglang-attention-backend fa3 "$@"
