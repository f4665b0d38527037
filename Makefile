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
	$(SUDO) $(BIN)/python -m pytest -n 4 --dist worksteal

.PHONY: bench
bench: venv ## measure: starts, changes, memory, first packets; a quarter of an hour
	$(BIN)/python -m pip install --quiet --group bench
	$(SUDO) $(BIN)/python -m tests.bench

.PHONY: soak
soak: venv ## changes, faults and traffic together for minutes; no connection may fail
	$(SUDO) $(BIN)/python -m tests.soak

.PHONY: fuzz
fuzz: venv ## three minutes of broken input for everything that reads something foreign
	$(BIN)/python -m tests.fuzz

.PHONY: image
image: venv ## carry out the Dockerfile without a container engine, and try the image; takes debootstrap
	$(SUDO) $(BIN)/python -m tests.image

.PHONY: docs
docs: venv ## the documentation, in build/docs; its reference pages are made anew from the code
	$(BIN)/python -m tests.docs.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: dist
dist: venv ## sdist and wheel in dist/, each tried in a clean environment
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/hatchling build
	tests/setup/try-dist.sh

LOCK := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --upgrade

.PHONY: lock
lock: venv ## renew the versions and hashes that the image is built with
	$(BIN)/python -m pip install --quiet --group release
	$(BIN)/uv pip compile $(LOCK) -o requirements.txt pyproject.toml
	$(BIN)/uv pip compile $(LOCK) -o requirements-build.txt --group build

.PHONY: clean
clean: ## remove what make has made here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
