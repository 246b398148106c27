# Every target sets up what it needs by itself; the environment is reused until a dependency changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

CORES ?= 2

.PHONY: help demo test test-fast check lint types bench soak docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: with its pinned build in place, nothing else asks for another one.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "Installing torch into $(VENV) (once) ..."
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing imputer into $(VENV) ..."
	$(PIP) -e '.[serve,figures]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing imputer and its development tools into $(VENV) ..."
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo  ## the shipped models at work on their sample recordings
	$(BIN)/imputer demo

test: $(VENV)/.dev  ## run all tests, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist loadfile $(TESTS)

test-fast: $(VENV)/.dev  ## the paper's oracles and the units, under a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist loadfile -m fast

lint: $(VENV)/.dev  ## ruff, style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

check: lint types test  ## everything that must pass before a commit

bench: $(VENV)/.dev  ## all benchmarks, printed as ratios within one run
	$(BIN)/imputer bench all

soak: $(VENV)/.dev  ## an hour of random kills, resumes and damage over a small training
	$(BIN)/python tools/soak.py --minutes $(or $(MINUTES),60)

docs: $(VENV)/.dev  ## build the documentation into site/
	$(BIN)/python tools/reference.py
	$(BIN)/zensical build --clean --strict

clean:  ## remove the environment and caches
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
