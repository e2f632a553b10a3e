#!/usr/bin/env bash
# Makes the virtual environment of the benchmarks' peer (TRL + PEFT): deploy/peers/install.sh VENV_DIR
#
# An environment of its own, so that neither side's pins hold the other back. Running it again costs a second:
# VENV_DIR/espalier-requirements.sha256 says which requirements are in.
#
# PYTHON: the interpreter to build from (default python3.11). Pip's own variables (PIP_EXTRA_INDEX_URL, ...) apply; where pip's torch carries CUDA,
# name PyTorch's index of CPU wheels there.
set -euo pipefail

if [ "$#" -ne 1 ]; then
    echo "usage: deploy/peers/install.sh VENV_DIR" >&2
    exit 2
fi
venv=$1
requirements=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/requirements.txt
stamp=$venv/espalier-requirements.sha256
wanted=$(sha256sum "$requirements" | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    echo "$venv is there and is no virtual environment; name another folder." >&2
    exit 2
fi
# --clear: a package that the requirements no longer name must go.
"${PYTHON:-python3.11}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"
"$venv/bin/python" -m pip check
# The proof that the set is whole.
"$venv/bin/python" -c 'from trl import GRPOConfig, GRPOTrainer'
echo "$wanted" >"$stamp"
