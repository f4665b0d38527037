# make run: a demonstration in a cluster of network namespaces.  make test: everything CI checks.
# Both set up what is missing first; as another user than root they use sudo for that and for network namespaces.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell tests/setup/python.sh)
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: system
system: ## install the Debian packages that are missing
	@tests/setup/packages.sh

.PHONY: venv
venv: $(VENV)/.ready ## set up .venv with pykubeproxy and its tools

$(VENV)/.ready: pyproject.toml pykubeproxy/__init__.py | system
	python3_path=$$(tests/setup/python.sh) && "$$python3_path" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

.PHONY: run
run: venv ## run the demonstration: every scenario, with real packets
	$(SUDO) $(BIN)/pykubeproxy lab demo

.PHONY: lint
lint: venv ## style, types, import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files '*.sh' .ci/run | xargs shellcheck

.PHONY: test
test: lint ## lint, then every test; those for root run in network namespaces of their own
	$(SUDO) $(BIN)/python -m pytest -n 3

.PHONY: bench
bench: venv ## measure: starts, changes, memory, first packets; a quarter of an hour
	$(BIN)/python -m pip install --quiet --group bench
	$(SUDO) $(BIN)/python -m tests.bench

.PHONY: clean
clean: ## remove what make has made here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
