# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: help test fast reproduce check format bench docs build clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+: .*##|^[a-z]+:  ##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/curvestep/_kernel/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[all,dev]"
	@touch $@

test: $(READY)  ## everything that CI runs, on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

fast: $(READY)  ## the tests that take seconds
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

reproduce: $(READY)  ## every figure and table of the paper at laptop scale
	$(BIN)/python -m curvestep reproduce $(ARGS)

check: $(READY)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

format: $(READY)  ## rewrite the code as `make check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## speed, side by side with the alternatives
	$(BIN)/python benchmarks/step.py $(ARGS)

docs: $(READY)  ## the documentation in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site $(ARGS)

build: $(READY)  ## wheel and source archive in dist/
	$(BIN)/python -m build

clean:  ## remove the environment and everything made
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis
