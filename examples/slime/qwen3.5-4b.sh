#!/usr/bin/env bash
# Qwen3.5-4B on one machine of 8 GPUs, colocated. With gated attention the drafter is trained at depth 1 only, by Megatron's
# own layer. slime's names for this family's drafter are right in both directions (Qwen3-Next's need patch 0001).
# Its delta nets keep a state that speculation must be able to roll back. So the number of steps is fixed, and the cache
# keeps snapshots. SGLang before 0.5.23 calls that flag --mamba-scheduler-strategy. With one number of steps there is
# nothing to choose.
# `rlspec convert` does not know this family: slime's tools/convert_hf_to_torch_dist.py makes LOAD.
# The parsers accept all flags below. The drafter of this family has not been trained here.
source "$(dirname "$0")/recipe.sh"
source "$SLIME/scripts/models/qwen3.5-4B.sh"
launch --drafter.depth 1 --drafter.lr 1e-4 --candidate-steps 2 -- \
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 \
  --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 \
  --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7 \
  --sglang-mamba-radix-cache-strategy extra_buffer "$@"
