#!/usr/bin/env bash
# MiMo-7B-RL on one machine of 8 GPUs: four train, and the run starts an engine on each of the other four. To start engines
# by hand instead: CUDA_VISIBLE_DEVICES=4 rlspec serve --model "$MODEL" --port 30004 and so on, with --candidate-steps as in
# [spec] of the TOML file, and ENGINES=http://127.0.0.1:30004,…
# Engines stop drafting where it does not pay: hundreds of requests an engine with short contexts.
source "$(dirname "$0")/recipe.sh"
launch mimo-7b-rl.toml 1 4 "$@"
