# make run: demonstration in a cluster of network namespaces.  make check: fast tests.  make test: all tests.
# They first install the Debian packages and the Python packages that they need and miss, the latter in .venv, in the locked
# versions. They use sudo unless root runs them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Without compiled modules, each process that the tests start takes twice the CPU time.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
LOCK := requirements
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(VENV)/.lab ## set up .venv with pykubeproxy, its lab and kubectl

# Each of these files says that .venv has the packages of a target.
LAB := $(LOCK)/build.txt $(LOCK)/node.txt $(LOCK)/lab.txt $(LOCK)/kubectl.txt
$(VENV)/.lab: pyproject.toml pykubeproxy/__init__.py $(LAB) | system-lab
	@tests/setup/step.sh "Installing pykubeproxy in $(VENV)" tests/setup/venv.sh $(VENV) $(LAB)
	@touch $@

$(VENV)/.%: $(LOCK)/%.txt $(VENV)/.lab
	@tests/setup/step.sh "Installing the tools of $< in $(VENV)" \
		$(BIN)/python -m pip install --progress-bar=off --no-deps --require-hashes --requirement $<
	@touch $@

$(VENV)/.docs: | $(VENV)/.check

system-%:
	@tests/setup/packages.sh $*

.PHONY: run
run: $(VENV)/.lab ## run the demonstration: every scenario with real packets
	$(SUDO) tests/setup/root.sh $(BIN)/pykubeproxy lab demo

.PHONY: lint
lint: | system-check $(VENV)/.check ## check style, types and import layers
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
check: lint ## lint, then run the fast unit tests
	$(BIN)/python -m pytest -n 2 -m 'not root and not hypothesis' tests/unit

# pytest compiles the tests once, so that not each of its workers does. This and mypy take one core each.
.PHONY: compile
compile: $(VENV)/.docs
	$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true

.PHONY: test
test: | system-test $(VENV)/.docs ## lint, then run all tests
	$(MAKE) --jobs=2 lint compile
	$(MAKE) pytest

.PHONY: pytest
pytest: | system-test $(VENV)/.docs ## run all tests; they use network namespaces of their own
	$(SUDO) tests/setup/root.sh tests/setup/isolated.sh $(BIN)/python -m pytest -n 6 --dist worksteal

.PHONY: test-iptables
test-iptables: $(VENV)/.check ## run the tests of the kernel with another iptables, built from source: VERSION=1.8.7 or 1.8.11
	$(SUDO) tests/setup/root.sh tests/setup/iptables.sh "$(VERSION)" $(BIN)/python -m pytest -n 2 tests/kernel

.PHONY: coverage
coverage: $(VENV)/.check $(VENV)/.coverage ## measure which lines the unit tests run; table in build/coverage.md
	mkdir -p build
	$(BIN)/python -m pytest -n 2 -m 'not root and not hypothesis' --cov=pykubeproxy --cov-report=markdown:build/coverage.md tests/unit

.PHONY: bench
bench: $(VENV)/.check ## measure starts, changes, memory and first packets (3 hours; OPTIONS="--only shapes")
	$(SUDO) $(BIN)/python -m tests.bench $(OPTIONS)

.PHONY: bench-fleet
bench-fleet: $(VENV)/.check ## measure kubectl pykubeproxy with 500 simulated nodes (2 minutes)
	$(BIN)/python -m tests.bench.fleet

.PHONY: soak
soak: $(VENV)/.check ## run changes, faults and traffic together (4 minutes)
	$(SUDO) $(BIN)/python -m tests.soak

.PHONY: handover
handover: $(VENV)/.check ## open a million connections while the proxy of a node is handed over; none may fail (15 minutes)
	$(SUDO) $(BIN)/python -m tests.handover

.PHONY: fuzz
fuzz: $(VENV)/.check ## feed broken input to all parsers, let a hostile tenant change objects, and break a lab (10 minutes)
	$(BIN)/python -m tests.fuzz
	$(SUDO) $(BIN)/python -m tests.fuzz.adversary
	$(SUDO) env PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m tests.fuzz.faults

# The date in built files, so that the same commit gives the same bytes.
COMMIT_DATE = $(shell git log -1 --format=%ct)

.PHONY: image
image: | system-image $(VENV)/.check ## build the image with podman, test it and leave it there; bill of materials in dist/ (2 minutes)
	mkdir -p dist
	$(SUDO) env SOURCE_DATE_EPOCH=$(COMMIT_DATE) $(BIN)/python -m tests.image $(OPTIONS)

.PHONY: docs
docs: $(VENV)/.docs ## build the documentation in build/docs, with the reference from the code
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: man
man: $(VENV)/.check ## write the man pages to build/man: man build/man/pykubeproxy-trace.1
	$(BIN)/python -m tests.docs.man build/man

.PHONY: serve
serve: docs ## build the documentation and serve it at http://127.0.0.1:8000, with its search
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs

.PHONY: dist
dist: $(VENV)/.docs $(VENV)/.dist ## build sdist, wheel with its bill of materials, plugin in one file, Helm chart and documentation in dist/; test packages
	rm -rf dist
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) $(BIN)/hatchling build
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) tests/setup/of-wheel.sh
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) tests/setup/plugin.sh
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m tests.chart build/chart dist/
	SOURCE_DATE_EPOCH=$(COMMIT_DATE) $(MAKE) docs
	tar --create --directory build/docs --sort=name --owner=0 --group=0 --numeric-owner --mode=go=u-w \
		--mtime="@$(COMMIT_DATE)" . | gzip --no-name >"dist/pykubeproxy-$$($(BIN)/hatchling version)-docs.tar.gz"
	tests/setup/try-dist.sh

.PHONY: chart
chart: $(VENV)/.check $(VENV)/.helm ## write the Helm chart to build/chart and test it with Helm
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m tests.chart build/chart
	$(BIN)/python -m pytest tests/unit/manifests/test_chart.py

.PHONY: lock
lock: $(VENV)/.lock ## renew the locked versions in requirements/
	tests/setup/lock.sh requirements

# The other releases are in build/, with a virtual environment of their own.
.PHONY: test-releases
test-releases: $(VENV)/.lock ## run all tests with other releases than the locked ones: RELEASES=newest or lowest
	tests/setup/releases.sh "$(RELEASES)"

.PHONY: clean
clean: ## remove .venv, build results and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
