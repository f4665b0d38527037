# make run: demonstration in a cluster of network namespaces.  make check: fast tests.  make test: all tests.
# They first install missing Debian packages and set up .venv. They use sudo unless root runs them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Without compiled modules, each process that the tests start takes twice the CPU time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell tests/setup/python.sh)
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: system
system: ## install missing Debian packages
	@tests/setup/packages.sh

.PHONY: venv
venv: $(VENV)/.ready ## set up .venv with pykubeproxy and its tools

$(VENV)/.ready: pyproject.toml pykubeproxy/__init__.py | system
	@echo "Installing pykubeproxy, kubectl and the tools of tests and documentation in $(VENV), in about a minute"
	@python3_path=$$(tests/setup/python.sh) && "$$python3_path" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --editable '.[lab]' --group dev
	@touch $@

.PHONY: run
run: venv ## run the demonstration: every scenario with real packets
	$(SUDO) tests/setup/root.sh $(BIN)/pykubeproxy lab demo

.PHONY: lint
lint: venv ## check style, types and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files '*.sh' .ci/run | xargs shellcheck
	$(BIN)/zizmor --offline --no-progress --quiet --persona=auditor .github
	git ls-files '.github/workflows/*.yml' | xargs $(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows
	git ls-files .github/dependabot.yml | xargs $(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot
	git ls-files '.github/ISSUE_TEMPLATE/[bf]*.yml' | xargs $(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms

.PHONY: check
check: lint ## lint, then run the fast unit tests (1 minute)
	$(BIN)/python -m pytest -n 2 -m 'not root and not hypothesis' tests/unit

# pytest compiles the tests once, so that not each of its workers does. This and mypy take one core each.
.PHONY: compile
compile: venv
	$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true

.PHONY: test
test: ## lint, then run all tests; they use network namespaces of their own
	$(MAKE) --jobs=2 lint compile
	$(SUDO) tests/setup/root.sh $(BIN)/python -m pytest -n 6 --dist worksteal

.PHONY: test-iptables
test-iptables: venv ## run the tests of the kernel with another iptables, built from source: VERSION=1.8.7 or 1.8.11
	$(SUDO) tests/setup/root.sh tests/setup/iptables.sh "$(VERSION)" $(BIN)/python -m pytest -n 2 tests/kernel

.PHONY: coverage
coverage: venv ## measure which lines the unit tests run; table in build/coverage.md
	mkdir -p build
	$(BIN)/python -m pip install --quiet --group coverage
	$(BIN)/python -m pytest -n 2 -m 'not root and not hypothesis' --cov=pykubeproxy --cov-report=markdown:build/coverage.md tests/unit

.PHONY: bench
bench: venv ## measure starts, changes, memory and first packets (3 hours; OPTIONS="--only shapes")
	$(SUDO) $(BIN)/python -m tests.bench $(OPTIONS)

.PHONY: bench-fleet
bench-fleet: venv ## measure kubectl pykubeproxy with 500 simulated nodes (2 minutes)
	$(BIN)/python -m tests.bench.fleet

.PHONY: soak
soak: venv ## run changes, faults and traffic together (4 minutes)
	$(SUDO) $(BIN)/python -m tests.soak

.PHONY: handover
handover: venv ## open a million connections while the proxy of a node is handed over; none may fail (15 minutes)
	$(SUDO) $(BIN)/python -m tests.handover

.PHONY: fuzz
fuzz: venv ## feed broken input to all parsers, let a hostile tenant change objects, and break a lab (10 minutes)
	$(BIN)/python -m tests.fuzz
	$(SUDO) $(BIN)/python -m tests.fuzz.adversary
	$(SUDO) env PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m tests.fuzz.faults

# The date in built files, so that the same commit gives the same bytes.
COMMIT_DATE = $(shell git log -1 --format=%ct)

.PHONY: image
image: venv ## build the image with podman, test it and leave it there; bill of materials in dist/ (2 minutes)
	mkdir -p dist
	$(SUDO) env SOURCE_DATE_EPOCH=$(COMMIT_DATE) $(BIN)/python -m tests.image $(OPTIONS)

.PHONY: docs
docs: venv ## build the documentation in build/docs and its reference pages from the code
	$(BIN)/python -m tests.docs.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: man
man: venv ## write the man pages to build/man: man build/man/pykubeproxy-trace.1
	$(BIN)/python -m tests.docs.man build/man

.PHONY: serve
serve: docs ## build the documentation and serve it at http://127.0.0.1:8000, with its search
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs

.PHONY: dist
dist: venv ## build sdist, wheel with its bill of materials, plugin in one file and Helm chart in dist/; test packages
	rm -rf dist
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-build.txt
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) $(BIN)/hatchling build
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) tests/setup/of-wheel.sh
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) tests/setup/plugin.sh
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m tests.chart build/chart dist/
	tests/setup/try-dist.sh

.PHONY: chart
chart: venv ## write the Helm chart to build/chart and test it with Helm
	$(BIN)/python -m pip install --quiet --group helm
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m tests.chart build/chart
	$(BIN)/python -m pytest tests/unit/manifests/test_chart.py

LOCK := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --upgrade

.PHONY: lock
lock: venv ## renew the pinned versions and hashes of the image
	$(BIN)/python -m pip install --quiet --group release
	$(BIN)/uv pip compile $(LOCK) --extra node -o requirements.txt pyproject.toml
	$(BIN)/uv pip compile $(LOCK) -o requirements-build.txt --group build

.PHONY: clean
clean: ## remove .venv, build results and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
