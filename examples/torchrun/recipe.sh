# Sourced by the recipes beside it. Set:
#   MODEL      Hugging Face directory, drafter included
#   DATA       prompts
#   RUN        a new directory
#   ENGINES    addresses of `rlspec serve`, separated by commas, on GPUs of their own. Unset, on one machine: the run starts an
#              engine on each of its 8 GPUs that does not train
#   RLSPEC_API_KEY           the engines' key, if they have one
#   NODE_RANK, MASTER_ADDR   on several machines; run the same command on each
# With --dry-run nothing starts: it prints what each rank would hold.
# Not yet run on GPUs (docs/gpu.md).
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

# launch TOML NODES GPUS_PER_NODE COMMAND-LINE: `rlspec train` on NODES x GPUS_PER_NODE ranks
launch() {
  local config=$here/$1 nodes=${NODES:-$2} gpus=${GPUS:-$3} word
  shift 3
  for name in MODEL DATA RUN; do : "${!name:?set $name, see recipe.sh}"; done
  local arguments=(train --config "$config" --model.path "$MODEL" --data.path "$DATA" --train.run_dir "$RUN" "$@")
  for word in "$@"; do
    [[ $word == --dry-run ]] && exec rlspec "${arguments[@]}" --ranks $((nodes * gpus))
  done
  if [[ -n ${ENGINES:-} ]]; then
    arguments+=(--rollout.urls "$ENGINES")
  else
    ((nodes == 1)) || : "${ENGINES:?set ENGINES, see recipe.sh}"
    arguments+=(--rollout.engines $((8 - gpus)))
  fi
  local master=(--standalone --local-addr 127.0.0.1)
  ((nodes > 1)) && master=(--node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}" --master-port "${MASTER_PORT:-29500}")
  exec torchrun --nnodes "$nodes" --nproc-per-node "$gpus" "${master[@]}" \
    -m megatron_rlspec.cli "${arguments[@]}"
}
