#!/usr/bin/env bash
# GLM-4.5-Air (106B, 12B active): 8 machines of 8 GPUs train. Engines run on other machines, each as
#   rlspec serve --model "$MODEL" --tp 8 --num-steps 1 --candidate-steps 0,1,2
# Here they have no key, so reach them over loopback (ssh -L 30000:127.0.0.1:30000 ENGINE). Set
# --push.address to the address of rank 0.
# Each pipeline stage has all its experts, and each expert is cut over the tensor-parallel ranks. --parallel.expert
# distributes whole experts instead.
# Not yet run on GPUs. A test compares the names and shapes of its first push with SGLang's own classes at TP 8.
# With 46 layers, parallel.pipeline is 2 or 23. Each verified token activates experts of its own, so few steps
# are allowed.
source "$(dirname "$0")/recipe.sh"
launch glm-4.5-air.toml 8 8 "$@"
