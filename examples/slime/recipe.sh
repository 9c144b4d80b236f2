# Sourced by the recipes beside it, none of which has run on GPUs. README.md explains each variable. Set:
#   SLIME      checkout of slime
#   MEGATRON   checkout of the Megatron-LM that slime pins, with slime's patch
#   MODEL      Hugging Face directory, drafter included
#   LOAD       the same model in Megatron's format
#   DATA       prompts
#   RUN        directory for checkpoints
#   DRY_RUN=1  optional: print the command and start nothing
set -euo pipefail
for name in SLIME MEGATRON MODEL LOAD DATA RUN; do : "${!name:?set $name, see recipe.sh}"; done
# `rlspec slime` passes this on to all Ray workers, and sets CUDA_DEVICE_MAX_CONNECTIONS and NCCL_CUMEM_ENABLE there.
export PYTHONPATH="$MEGATRON${PYTHONPATH:+:$PYTHONPATH}"

# launch RLSPEC_OPTIONS -- SLIME_ARGUMENTS: join the Ray cluster that is running, or start one on this machine.
launch() {
  local ours=()
  while [[ $1 != -- ]]; do ours+=("$1"); shift; done
  shift
  [[ -n ${DRY_RUN:-} ]] && ours+=(--dry-run)
  exec rlspec slime --folder "$RUN/rlspec" "${ours[@]}" -- \
    python3 "$SLIME/train.py" "${MODEL_ARGS[@]}" \
    --hf-checkpoint "$MODEL" --load "$LOAD" --ref-load "$LOAD" --save "$RUN" --save-interval 100 \
    --prompt-data "$DATA" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --rm-type deepscaler --num-rollout 3000 --rollout-temperature 1 --balance-data \
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0 \
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 \
    --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 9216 "$@"
}
