# Every target sets itself up: the first one makes .venv, later ones find it done.
#
#   make PYTHON=/path/to/python3.12 test    another interpreter (3.11 or newer)
#   make JOBS=8 test                        test processes; each computes on one thread

VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The first that runs, is new enough and can make environments. 3.11 is what the pinned versions were tested with.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$python" && break; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all check format venv clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

demo: $(READY) ## convert the example model, distil it, compare, reload (a few minutes on two cores)
	@$(BIN)/python examples/plays/demo.py

test: check ## format, lint, types, then the tests that are not slow
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-all: check ## the same with the slow tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

check: $(READY) ## format, lint and types only
	@$(BIN)/python -m ruff format --check --quiet . || { echo "to fix this: make format"; exit 1; }
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m mypy

format: $(READY) ## rewrite the code in the one format, and fix what lint can fix
	@$(BIN)/python -m ruff check --fix --quiet . || true
	@$(BIN)/python -m ruff format .

venv: $(READY) ## the environment alone

# The file is written last: a set-up that was interrupted or failed is done again, a complete one is not, and a
# change of either file below installs what changed. torch comes first and alone because it is the large download,
# and because a local CPU build is taken for the pin where pip knows one.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv here; use make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,demo]"
	@touch $@

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
