# All targets run in .venv, which is made on first use: no environment needs to be active, and
# nothing but Python 3.10 or newer has to be installed.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Named after what was installed: the environment is used as it is until one of these files changes.
STAMP := $(VENV)/installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## Train the default recipe, dense and sparse: a table, and files in outputs/
	$(BIN)/sparse-lightning

test: $(STAMP) ## Run tests and examples; more options: make test PYTEST_ARGS="-k layout"
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

bench: $(STAMP) ## Run every benchmark: results are checked, then times are compared
	@for file in benchmarks/*.py; do echo "== $$file"; PYTHONPATH=. $(BIN)/python "$$file" || exit 1; done

clean: ## Remove caches and build products; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	@rm -f $(VENV)/installed-* && touch $@
