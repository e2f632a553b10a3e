#!/usr/bin/env bash
# Starts vLLM as a serving replica and rollout engine of this project: deploy/vllm/serve.sh [more vLLM arguments]
# The one place with vLLM's command line: docker-compose.yml, `make test-vllm` and people use it alike.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

: "${ESPALIER_BASE_MODEL_PATH:?folder of the base model (config.json, tokenizer, safetensors)}"
: "${ESPALIER_BASE_MODEL_NAME:=SmolLM2-135M-Instruct}"
# ESPALIER_STORE_URL: the object store that adapters come from. ESPALIER_RESOLVER_CACHE: folder for fetched adapters, this server's own.
: "${ESPALIER_VLLM_PYTHON:=$here/../../.venv-vllm/bin/python}" # interpreter of the environment that install.sh made
: "${ESPALIER_VLLM_HOST:=127.0.0.1}"                           # vLLM has no tenants: keep it private to the gateway
: "${ESPALIER_VLLM_PORT:=8200}"
: "${ESPALIER_VLLM_DTYPE:=float32}"        # exact against the trainer; bfloat16 where the hardware has it
: "${ESPALIER_VLLM_MAX_MODEL_LEN:=2048}"   # tokens of prompt and completion
: "${ESPALIER_VLLM_MAX_NUM_SEQS:=32}"      # sequences in one batch
: "${ESPALIER_VLLM_MAX_LORAS:=4}"          # adapters in one batch
: "${ESPALIER_VLLM_MAX_CPU_LORAS:=16}"     # adapters kept in memory
: "${ESPALIER_VLLM_MAX_LORA_RANK:=64}"     # largest rank; every slot has its size
: "${ESPALIER_VLLM_KV_CACHE_GIB:=1}"
: "${ESPALIER_VLLM_THREADS:=$(nproc)}"     # on CPU; two OpenMP teams on one core fall to a tenth, so share cores with nothing

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 # turns on the resolver, and load and unload by HTTP
export VLLM_PLUGINS="${VLLM_PLUGINS-espalier}" # the routes of registry/vllm_plugin/endpoints.py need to be named
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_KVCACHE_SPACE="$ESPALIER_VLLM_KV_CACHE_GIB"
# vLLM's own binding keeps one core free, half of a small machine.
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS="$ESPALIER_VLLM_THREADS"

# The module, not the `vllm` command: that looks for a distribution called vllm, and the CPU build is called vllm-cpu.
# --enforce-eager: our LoRA ops on CPU depend on the data. processed_logprobs: logprobs at the sampling temperature, as the trainer computes them.
exec "$ESPALIER_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server \
    --model "$ESPALIER_BASE_MODEL_PATH" --served-model-name "$ESPALIER_BASE_MODEL_NAME" \
    --host "$ESPALIER_VLLM_HOST" --port "$ESPALIER_VLLM_PORT" \
    --dtype "$ESPALIER_VLLM_DTYPE" --max-model-len "$ESPALIER_VLLM_MAX_MODEL_LEN" --max-num-seqs "$ESPALIER_VLLM_MAX_NUM_SEQS" \
    --enable-lora --max-loras "$ESPALIER_VLLM_MAX_LORAS" --max-cpu-loras "$ESPALIER_VLLM_MAX_CPU_LORAS" \
    --max-lora-rank "$ESPALIER_VLLM_MAX_LORA_RANK" \
    --worker-extension-cls registry.vllm_plugin.worker.AdapterInspector \
    --enforce-eager --logprobs-mode processed_logprobs \
    "$@"
