#!/usr/bin/env bash
# Qwen3-8B with an EAGLE-3 drafter. Besides the variables of recipe.sh set DRAFTER, a directory that all nodes see:
#   hf download …                          a published drafter with safetensors, made for this model, or
#   rlspec convert MODEL DRAFTER --add-eagle3   a fresh one; warm it up before RL (docs/drafter.md)
# Engines must be SGLang 0.5.23 (torch 2.14.1, CUDA 13), which slime's image has not: see docs/slime.md. It does not run
# in that image. Pipeline stages are refused.
# Llama-3.1-8B: the same lines with scripts/models/llama3.1-8B-Instruct.sh.
# --drafter.train false in place of --drafter.lr leaves a published drafter as it is, and reports how far it has aged.
: "${DRAFTER:?set DRAFTER, the directory of an EAGLE-3 drafter}"
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/qwen3-8B.sh"
launch --drafter.kind eagle3 --drafter.path "$DRAFTER" --drafter.lr 1e-4 --candidate-steps 0,1,2,3 -- \
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --attention-backend flash --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7 "$@"
