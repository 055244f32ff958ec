#!/usr/bin/env bash
# Prints the path of a Python that can make this project's environment; with none, one line on
# stderr that says what to do.
set -euo pipefail

# Only running a candidate tells: pyenv leaves shims of versions that are not selected, and Debian
# ships a Python whose venv cannot install pip. The free-threaded build has too few wheels.
readonly CHECK='
import sys
if sys.version_info < (3, 12): sys.exit(1)
import ensurepip, ssl, sysconfig, venv
if sysconfig.get_config_var("Py_GIL_DISABLED"): sys.exit(1)
print(sys.executable)
'

candidates() {
  local name
  for name in python3.13 python3.12 python3; do
    type -aP "$name" || true
  done
  printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python3 | sort -rV
}

while IFS= read -r candidate; do
  # The environment must not be made from itself, as it would be with .venv active.
  [[ $candidate == "$PWD/.venv/"* ]] && continue
  if found=$("$candidate" -c "$CHECK" </dev/null 2>/dev/null); then
    printf '%s\n' "$found"
    exit 0
  fi
done < <(candidates)

echo "carat-jax needs Python 3.12 or newer with venv and found none: install one (apt install" \
  "python3.12-venv, brew install python@3.12 or pyenv install 3.12) and run make again" >&2
exit 1
