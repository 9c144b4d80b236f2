#!/usr/bin/env bash
# Runs the whole RL loop on a machine without a GPU: warm start, GRPO with a co-trained drafter, and a closing table.
#   [SEED=2] bash examples/quickstart.sh [RUN_DIR]
# It takes 5 to 8 minutes on 2 quiet cores after installation. Finished parts are not repeated, and an interrupted part
# goes on where it was. Each SEED has a RUN_DIR of its own.
set -euo pipefail
run=${1:+$(realpath -m -- "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_cpu.sh --no-hints
run=${run:-runs/quickstart${SEED:+-seed-$SEED}}
python=.venv/bin/python
seed=${SEED:-1}
config=(--config examples/quickstart/quickstart.toml --train.seed "$seed")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rlspec() { "$python" -m megatron_rlspec.cli "$@" --ranks 2 --train.resume true; }
part() { printf '\n== %s\n' "$*"; }

part "a task, and a model of MiMo's shape with random weights"
[ -s "$run/task/tokenizer_config.json" ] || "$python" examples/quickstart/make_task.py --out "$run/task" --seed "$seed"
[ -e "$run/model" ] || "$python" examples/quickstart/make_model.py --task "$run/task" --out "$run/model" --seed "$seed"

part "warm start: policy and drafter on demonstrations"
[ -e "$run/warm/hf" ] || rlspec sft "${config[@]}" --model.path "$run/model" --sft.path "$run/task/train.jsonl" \
    --train.run_dir "$run/warm" --optimizer.lr 3e-3 --drafter.lr 3e-3 --optimizer.warmup_steps 40 --optimizer.decay_steps 600

part "RL: 60 GRPO steps, the drafter trained with the policy and pushed with it; every step is recorded"
[ -e "$run/rl/hf" ] || rlspec train "${config[@]}" --model.path "$run/warm/hf" --data.path "$run/task/rl.jsonl" \
    --data.eval_path "$run/task/eval.jsonl" --train.run_dir "$run/rl" --train.record_gib 20

part "control: the warm start's drafter, trained for as many steps on the warm policy's own answers"
alone=(--rollout.engine embedded --spec.mode fixed)
[ -e "$run/control/hf" ] || rlspec replay "$run/rl" --replay.policy_step 0 --train.run_dir "$run/control" "${alone[@]}"

part "upper bound: the same drafter, trained for twice as many steps on the final policy's own answers"
[ -e "$run/upper/hf" ] || rlspec replay "$run/rl" --replay.policy_step 60 --train.steps 120 \
    --train.run_dir "$run/upper" "${alone[@]}"

part "closing table: four drafters and a plain engine on the final policy"
"$python" examples/quickstart/proof.py --run "$run"
