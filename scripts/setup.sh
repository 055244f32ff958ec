#!/usr/bin/env bash
# Makes .venv and installs this checkout into it: with CUDA where nvidia-smi finds a GPU, else for
# the CPU. Does nothing when nothing has changed; after an interruption it starts over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$(pwd -P)
cd "$root"
readonly root stamp=.venv/carat-setup

main() {
  local extras python
  extras=$(extras_for_this_machine)
  if [[ $(read_stamp) == "$(describe "$extras")" ]]; then
    return
  fi
  if ! venv_is_usable; then
    python=$(bash scripts/find_python.sh)
    echo "Making .venv with $("$python" -V)"
    "$python" -m venv --clear .venv
  fi
  echo "Installing carat-jax[$extras] (a few minutes the first time)"
  echo incomplete >"$stamp"
  .venv/bin/python -m pip install --constraint constraints.txt --editable ".[$extras]"
  describe "$extras" >"$stamp"
}

extras_for_this_machine() {
  # nvidia-smi reports the newest CUDA that the driver supports, newer ones as "CUDA UMD Version".
  local report pattern='CUDA[A-Z ]* Version: *([0-9]+)'
  if ! report=$(nvidia-smi 2>/dev/null); then
    echo test
  elif [[ $report =~ $pattern ]] && ((BASH_REMATCH[1] >= 13)); then
    echo test,cuda13
  else
    echo test,cuda12
  fi
}

# Everything that an installation depends on. The stamp holds it once the installation is done.
describe() {
  printf '%s\n' "$root" "$1"
  .venv/bin/python -VV 2>/dev/null || true
  cksum pyproject.toml constraints.txt
}

read_stamp() {
  cat "$stamp" 2>/dev/null || true
}

# An environment left by an interrupted run, moved from another folder (its scripts hold the old
# path) or made by a Python that is gone or too old is better made again than mended.
venv_is_usable() {
  [[ $(read_stamp) != incomplete ]] &&
    grep -qsF "$root/.venv/bin/python" .venv/bin/pip &&
    .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

main
