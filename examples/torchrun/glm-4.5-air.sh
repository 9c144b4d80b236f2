#!/usr/bin/env bash
# GLM-4.5-Air (106B, 12B active): 8 machines of 8 GPUs train. Engines run elsewhere, each `rlspec serve --tp 8`; they are
# reached without a key, hence over loopback (ssh -L 30000:127.0.0.1:30000 ENGINE); set --push.address to rank 0.
# Experts are whole on a pipeline stage, each cut over its tensor-parallel ranks; --parallel.expert shares them out instead.
# Not yet run on GPUs. A test compares the names and shapes of its first push with SGLang's own classes at TP 8.
# 46 layers: pipeline 2 or 23. A verified token wakes its own experts: profile before allowing many steps.
# DeepSeek-V3 has no recipe here: its latent attention is converted, but not trained, and --dry-run says so.
source "$(dirname "$0")/recipe.sh"
launch glm-4.5-air.toml 8 8 "$@"
