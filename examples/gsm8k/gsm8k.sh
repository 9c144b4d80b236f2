#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-1.5B-Instruct on one machine. README.md says what to expect. Not yet run on a GPU.
#   MODEL=Qwen2.5-1.5B-Instruct DATA=gsm8k RUN=runs/gsm8k bash examples/gsm8k/gsm8k.sh SIZE [--section.key value ...]
#   SIZE   8x80: 6 GPUs train and 2 generate; 1x80, 1x24: one GPU trains and generates in turn; cpu: a small model
#   MODEL  Hugging Face directory;  RUN  a new directory
#   DATA   directory with train and test rows, as main/ of the data set: train*.parquet and test*.parquet, or .jsonl
# With --dry-run nothing starts: it prints what each rank would hold.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
size=${1:?give 8x80, 1x80, 1x24 or cpu}
shift
for name in MODEL DATA RUN; do : "${!name:?set $name, see the top of gsm8k.sh}"; done
rows() { find -L "$DATA" -maxdepth 2 \( -name "$1*.parquet" -o -name "$1*.jsonl" \) | sort | head -n 1; }
train=$(rows train) test=$(rows test)
: "${train:?no train*.parquet or train*.jsonl in $DATA}" "${test:?no test*.parquet or test*.jsonl in $DATA}"
case $size in
8x80) ranks=6 gib=80 options=(--rollout.engines 2 --optimizer.distributed true) ;;
1x80) ranks=1 gib=80 options=() ;;
1x24) ranks=1 gib=24 options=(--parallel.recompute true --train.tokens_per_micro_batch 4096 --rollout.prompts_per_step 32) ;;
cpu) ranks=1 gib=0 options=(--model.dtype float32 --model.max_length 480 --rollout.max_new_tokens 32 --rollout.prompts_per_step 8
  --rollout.max_running_requests 64 --rollout.max_total_tokens 16384 --optimizer.lr 1e-4 --train.eval_prompts 16) ;;
*) echo "gsm8k.sh: SIZE=$size; expected 8x80, 1x80, 1x24 or cpu" >&2 && exit 2 ;;
esac
for word in "$@"; do
  [[ $word == --dry-run ]] && ((gib)) && options+=(--gpu-gib "$gib")
done
exec rlspec train --ranks "$ranks" --config "$here/gsm8k.toml" --model.path "$MODEL" --data.path "$train" \
  --data.eval_path "$test" --train.run_dir "$RUN" "${options[@]}" "$@"
