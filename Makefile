# Needs make, git and a Python of at least 3.11. Everything else goes into .venv, from the lock file.

SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PYTHONS := python3 python3.13 python3.12 python3.11 python3.14 python

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help
help: ## show these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(STAMP) ## run the demonstration (MODEL=provider/model and BASE_URL=... choose a real model)
	@$(BIN)/fencepost demo $(if $(MODEL),--model '$(MODEL)') $(if $(BASE_URL),--base-url '$(BASE_URL)')

.PHONY: test
test: $(STAMP) ## run the whole test suite against real servers (ARGS=... goes to pytest)
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

.PHONY: check
check: $(STAMP) ## lint, format, types, import rules, house rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest -q tests/house

.PHONY: bench
bench: $(STAMP) ## run the benchmarks
	@$(BIN)/python -m bench $(ARGS)

.PHONY: chaos
chaos: $(STAMP) ## N random sessions under random faults, which follow from SEED; all counts have to be 0
	@$(BIN)/python -m tests.chaos --sessions $(or $(N),200) --seed $(or $(SEED),7) $(ARGS)

.PHONY: model
model: $(STAMP) ## explore the ownership protocol, with each of its rules left out; then the store beside its model
	@$(BIN)/python -m tests.model $(ARGS)
	@MODEL_EXAMPLES=$(or $(N),200) $(BIN)/python -m pytest -q tests/model/test_store_machine.py

COMPILE = UV_NO_CONFIG=1 $(BIN)/uv pip compile pyproject.toml --extra build --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet

.PHONY: lock
lock: $(STAMP) ## resolve both lock files anew from pyproject.toml: for working here, and for the worker's image
	@$(COMPILE) --extra local --extra dev --upgrade --output-file requirements.lock
	@$(COMPILE) --constraint requirements.lock --output-file requirements-worker.lock
	@echo "requirements.lock holds $$(grep -c == requirements.lock) packages, requirements-worker.lock $$(grep -c == requirements-worker.lock)"

.PHONY: clean
clean: ## remove the environment and everything that tools left behind
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@found=; \
	for name in $(PYTHONS); do \
		if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$name; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "fencepost needs Python 3.11 or newer; looked for: $(PYTHONS)" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
		echo "$$found cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; \
		exit 1; \
	fi; \
	"$$found" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

$(STAMP): $(VENV)/bin/python requirements.lock pyproject.toml
	@begun=$$(date +%s); \
	printf 'installing dependencies ... '; \
	log=$(VENV)/install.log; \
	if $(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock >"$$log" 2>&1 && \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . >>"$$log" 2>&1; then \
		echo "done in $$(($$(date +%s) - begun)) s"; touch $@; \
	else \
		echo "failed"; cat "$$log" >&2; exit 1; \
	fi
