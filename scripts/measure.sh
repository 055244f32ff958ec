#!/usr/bin/env bash
# Measures again what benchmarks/h200 holds of one GPU, a process at a time, the results into a folder.
#
#   scripts/measure.sh FOLDER [GROUP...]    GROUP: steps serving attention prefill agreement, or all
#
# A result is written as soon as it is there; what exists in the folder already is not measured again.
# CARAT is the command (default .venv/bin/carat, that of `make setup`).
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
folder=$1
shift
mkdir -p "$folder"

bench() { # bench NAME COMMAND...
  [ -e "$folder/$1.json" ] && return
  echo "== $1: carat bench ${*:2} ($SECONDS s)"
  ${CARAT:-.venv/bin/carat} bench "${@:2}" --json "$folder/$1.json" || failed+=("$1")
}
failed=()

steps() {
  bench speculative_31b speculative --config 31b
  bench speculative_31b_3 speculative --config 31b --acceptance .92 .78 .67
  bench decode_31b decode --config 31b
  bench decode_31b_contexts decode --config 31b --batch 1 --context 1024 6005 131072
  for size in 26b-a4b e2b e4b 12b; do
    bench "decode_$size" decode --config $size --batch 1 --context 2048
  done
}

serving() {
  local served=(serving --config 31b --max-context 8192)
  local drawn=(--prompt lognormal:256:0.7 --output fixed:512)
  local drafted=("${served[@]}" --drafter assistant)
  bench serving_31b_8 "${drafted[@]}" "${drawn[@]}" --slots 8 --requests 32
  bench serving_31b_3 "${drafted[@]}" "${drawn[@]}" --slots 3 --requests 12
  bench serving_31b_6k "${drafted[@]}" --slots 4 --workload benchmarks/workloads/long_prompt.jsonl
  bench serving_31b_3_plain "${served[@]}" "${drawn[@]}" --slots 3 --requests 12
}

attention() {
  bench attention_31b attention --config 31b --op ring global --tokens 1 4 5 --implementation mosaic
  bench prefill_attention_31b attention --config 31b --op prefill --context 8192 --implementation mosaic
  bench ablation_31b ablation --config 31b --no-png
}

prefill() { # compiles everything itself
  JAX_ENABLE_COMPILATION_CACHE=false bench prefill_31b_cold prefill --config 31b --prompt 8192 100000 --max-context 131072
}

agreement() {
  bench agreement_tiny agreement --tokens 2000
  bench agreement_31b agreement --config 31b --tokens 2000
  bench agreement_31b_drawn agreement --config 31b --tokens 2000 --temperature 1
}

for group in "${@:-all}"; do
  case $group in
    all) steps; serving; attention; prefill; agreement ;;
    steps | serving | attention | prefill | agreement) $group ;;
    *) echo "$group is no group: steps, serving, attention, prefill, agreement, all" >&2; exit 2 ;;
  esac
done
[ ${#failed[@]} = 0 ] || { echo "not measured: ${failed[*]}" >&2; exit 1; }
