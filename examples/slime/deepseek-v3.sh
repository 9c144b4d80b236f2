#!/usr/bin/env bash
# DeepSeek-V3 class on 16 machines of 8 GPUs. With latent attention and experts the drafter is trained at depth 1 only.
# SGLang switches adaptive speculation off under attention data parallelism, so engines here run without that parallelism.
# At large batch speculation costs more than it saves; the cost table says from which batch on. Profile first, on the two
# machines of one engine (`rlspec serve` on both):
#   rlspec profile "$TABLE" --url http://HOST:30000 --steps 0,1,2 --batches 1,4,16,64 --lengths 512,4096
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/deepseek-v3.sh"
launch --drafter.depth 1 --drafter.lr 1e-4 --candidate-steps 0,1,2 --num-steps 1 -- \
  --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 1024 --rollout-max-response-len 16384 \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4 \
  --decoder-last-pipeline-num-layers 13 \
  --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 \
  --rollout-num-gpus-per-engine 16 --sglang-mem-fraction-static 0.7 "$@"
