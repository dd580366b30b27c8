# All targets run in .venv, which is created on first use: no environment needs to be active, and only
# Python 3.10 or newer has to be installed.

PYTHON ?= python3
PYTEST_ARGS ?=
PEERS_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Named after what is installed: .venv is used as it is until the requirements change. Settings of tools, which follow
# them in pyproject.toml, don't count.
STAMP := $(VENV)/installed-$(shell sed '/^\[tool\./,$$d' pyproject.toml | cat - constraints.txt | cksum | cut -d ' ' -f 1)
# An environment of its own for other libraries, whose requirements are not those of this package.
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/installed-$(shell cat pyproject.toml constraints.txt benchmarks/peers/requirements.txt | cksum | cut -d ' ' -f 1)
# Many programs are started: without their bytecode each would compile this package and its tests again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-exhaustive test-gpu lint format bench bench-peers bench-pages clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## Train the default recipe, dense and sparse: prints a table, writes files to outputs/
	$(BIN)/sparse-lightning

test: $(STAMP) ## Run tests and doctests in a few minutes; options: make test PYTEST_ARGS="-k layout"
	$(PYTEST) $(PYTEST_ARGS)

test-exhaustive: $(STAMP) ## Run the long forms of tests: full products of parameters, many kills, many random examples
	EXAMPLES=$${EXAMPLES:-300} $(PYTEST) -m "exhaustive or hypothesis" $(PYTEST_ARGS)

test-gpu: $(STAMP) ## Run the tests that need CUDA devices: one GPU, or two for NCCL; without one they are skipped
	$(PYTEST) -m gpu $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, formatting and types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

format: $(STAMP) ## Format the code and apply automatic fixes
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

bench: $(STAMP) ## Run every benchmark, on a GPU where there is one: check results, then compare times
	@for file in benchmarks/*.py; do echo "== $$file"; PYTHONPATH=. $(BIN)/python "$$file" || exit 1; done

bench-peers: $(PEERS_STAMP) ## Measure beside other libraries, add to docs/results; options: make bench-peers PEERS_ARGS=--help
	PYTHONPATH=.:benchmarks $(PEERS)/bin/python benchmarks/peers/run.py $(PEERS_ARGS)

bench-pages: $(STAMP) ## Make the pages of docs/results from its measurements
	PYTHONPATH=.:benchmarks $(BIN)/python benchmarks/peers/pages.py --readme README.md

clean: ## Remove caches and build products, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	@rm -f $(VENV)/installed-* && touch $@

$(PEERS_STAMP):
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --constraint constraints.txt --editable ".[hf]" \
		--requirement benchmarks/peers/requirements.txt
	@touch $@
