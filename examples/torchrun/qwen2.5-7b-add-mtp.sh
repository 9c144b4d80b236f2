#!/usr/bin/env bash
# Qwen2.5-7B, which has no drafter, on one machine of 8 GPUs: four train, four generate (see mimo-7b-rl.sh).
#   rlspec convert Qwen2.5-7B with-drafter --add-mtp --to hf       a fresh drafter, made from the first layer
#   torchrun … -m megatron_rlspec.cli sft --sft.drafter_only true  until accept length is flat; its hf/ is MODEL
# Drafts of an untrained drafter are never accepted, so speculation only costs time. Do not skip the warm-up.
source "$(dirname "$0")/recipe.sh"
launch qwen2.5-7b-add-mtp.toml 1 4 "$@"
