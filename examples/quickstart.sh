#!/usr/bin/env bash
# Runs the whole RL loop on a machine without a GPU: warm start, GRPO with a co-trained drafter, and a closing table.
#   bash examples/quickstart.sh [RUN_DIR]
# It takes 6 to 8 minutes on 2 cores after installation. Finished parts are not repeated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_cpu.sh
run=${1:-runs/quickstart}
python=.venv/bin/python
config=(--config examples/quickstart/quickstart.toml --data.eval_path "$run/task/eval.jsonl")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rlspec() { "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_rlspec.cli "$@"; }
part() { printf '\n== %s\n' "$*"; }

part "a task, and a model of MiMo's shape with random weights"
[ -e "$run/task/eval.jsonl" ] || "$python" examples/quickstart/make_task.py --out "$run/task"
[ -e "$run/model" ] || "$python" examples/quickstart/make_model.py --task "$run/task" --out "$run/model"

part "warm start: policy and drafter on demonstrations"
[ -e "$run/warm/hf" ] || rlspec sft "${config[@]}" --model.path "$run/model" --sft.path "$run/task/train.jsonl" \
    --train.run_dir "$run/warm" --spec.mode fixed --optimizer.lr 3e-3 --drafter.lr 3e-3 --optimizer.warmup_steps 40 \
    --optimizer.decay_steps 600

part "RL: 30 GRPO steps, the drafter trained with the policy and pushed with it"
[ -e "$run/rl/hf" ] || rlspec train "${config[@]}" --model.path "$run/warm/hf" --data.path "$run/task/rl.jsonl" \
    --train.run_dir "$run/rl"

part "control: the warm-start drafter trained for as many steps on the warm start's demonstrations"
[ -e "$run/control/hf" ] || rlspec sft "${config[@]}" --model.path "$run/warm/hf" --sft.path "$run/task/train.jsonl" \
    --train.run_dir "$run/control" --sft.drafter_only true --sft.steps 30 --sft.samples_per_step 128 --sft.eval_every 0

part "closing table: three drafters and a plain engine on the final policy"
"$python" examples/quickstart/proof.py --run "$run"
