#!/usr/bin/env bash
# DeepSeek-V3 class on 16 machines of 8 GPUs. With latent attention and experts the drafter is trained at depth 1 only.
# SGLang switches adaptive speculation off under attention data parallelism, so engines here run without that parallelism.
# At large batch speculation costs more than it saves; engines find out from which batch on.
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/deepseek-v3.sh"
launch --drafter.depth 1 --drafter.lr 1e-4 --candidate-steps 0,1,2 -- \
  --sglang-speculative-num-steps 1 \
  --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 1024 --rollout-max-response-len 16384 \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4 \
  --decoder-last-pipeline-num-layers 13 \
  --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 \
  --rollout-num-gpus-per-engine 16 --sglang-mem-fraction-static 0.7 "$@"
