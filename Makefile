# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# Empty, the newest versions of everything are installed.
PINS   ?= -c constraints.txt
export OMP_NUM_THREADS ?= 1

# The oldest versions that pyproject.toml admits. A torch of its own index may be given: OLDEST_PIP="--index-url …".
OLDEST      ?= .oldest
OLDEST_SET  := torch==2.6.0 numpy==1.26.0 scipy==1.11.1
OLDEST_PIP  ?=
PYTHON_OLD  ?= $(shell for p in python3.11 ~/.pyenv/versions/3.11*/bin/python3.11 $(PYTHON); do $$p -c '' 2>/dev/null && echo $$p && break; done)
STRICT      := tests/test_strict_device.py tests/optim/test_device.py tests/optim/test_graphs.py
CORE        := tests/tensors/test_kernel.py tests/tensors/test_vectors.py tests/test_steps.py tests/optim tests/smoothness tests/trace tests/calibration
# torch 2.6 says of its own SequentialLR that it is deprecated.
CORE_TESTS  := -m pytest -q -n 2 --dist loadfile -m "not slow" -W "ignore:The epoch parameter:UserWarning"

.PHONY: help test fast reproduce keep check format bench oldest compat soak faults sanitize docs build try clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+: .*##|^[a-z]+:  ##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(READY): pyproject.toml reproduction/pyproject.toml constraints.txt hatch_build.py $(wildcard src/curvestep/tensors/kernel/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(PIP) -q $(PINS) -U pip  # that knows dependency groups
	$(PIP) $(PINS) -e ".[report,lightning,transformers,loggers]" -e "./reproduction[ray]" --group dev
	@touch $@

test: $(READY)  ## everything that CI runs, on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

fast: $(READY)  ## the tests that take seconds
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

reproduce: $(READY)  ## every figure and table of the paper at laptop scale
	$(BIN)/python -m curvestep reproduce $(ARGS)

keep: $(READY)  ## keep the ended runs below FOLDER, made by COMMIT, and write the pages
	$(BIN)/python reproduction/pages.py --keep "$(FOLDER)" --commit "$(COMMIT)"

check: $(READY)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

format: $(READY)  ## rewrite the code as `make check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## speed, side by side with the alternatives
	$(BIN)/python benchmarks/step.py $(ARGS)

$(OLDEST)/.ready: pyproject.toml hatch_build.py $(wildcard src/curvestep/tensors/kernel/*.[ch])
	$(PYTHON_OLD) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(OLDEST_PIP) \
		$(OLDEST_SET) -e . pytest pytest-xdist hypothesis "pandas<3"
	@touch $@

define core
	$(1) -c "import sys, torch, numpy as n, scipy as s; print(sys.version[:7], torch.__version__, n.__version__, s.__version__)"
	$(1) -m pytest -q $(STRICT)
	$(1) $(CORE_TESTS) $(CORE) $(addprefix --ignore=,$(STRICT))
endef

oldest: $(OLDEST)/.ready  ## the core tests with the oldest versions that pyproject.toml admits
	$(call core,$(OLDEST)/bin/python)

compat: oldest $(READY)  ## the same with the pinned versions too
	$(call core,$(BIN)/python)

soak: $(READY)  ## 2,000 random parameter sets against float64, ten kills, 20,000 steps with the probe
	$(BIN)/python benchmarks/soak.py --page benchmarks/results/soak.md $(ARGS)

faults: $(READY)  ## every test that tests/FAULTS.md names
	$(BIN)/python -m pytest -q $$(grep -oE '[a-z_/]*tests/[a-z_/]+\.py::[a-zA-Z0-9_]+' tests/FAULTS.md | sort -u) $(ARGS)

sanitize: $(READY)  ## tests of the kernel, compiled with gcc's checks of memory and arithmetic
	$(BIN)/python tests/support/sanitized.py -q -p no:cacheprovider -m "not slow" tests/tensors/test_kernel.py $(ARGS)

docs: $(READY)  ## the documentation in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site $(ARGS)

build: $(READY)  ## wheels and source archives of both packages in dist/
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist reproduction

try: build  ## what is in dist/ in an empty environment: README's script, a run, the page
	$(PYTHON) tests/support/empty_environment.py dist

clean:  ## remove the environment and everything made
	rm -rf $(VENV) $(OLDEST) dist site .pytest_cache .ruff_cache .hypothesis
