# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv first. `make help` lists all.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build of torch where no NVIDIA driver is found; TORCH=... overrides it.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11" || echo "torch==2.13.0")
# The version that is tested and that the GPU figures were made with; a CUDA build of torch that brings another is not taken.
TRITON ?= triton==3.6.0
PYTEST_ARGS ?=
# vLLM for CPUs, TRL and transformers at fixed versions, for tests/integrations. Not beside a CUDA build of torch.
INTEGRATIONS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo yes)
# transformers' source distribution: its own tests of models, which tests/integrations/peers runs.
SOURCES := $(shell sed -n 's/^transformers==/transformers-/p' integrations/requirements.txt)

.PHONY: help demo test test-gpu bench sanitize docs site lint setup setup-integrations chromium clean

setup: $(VENV)/.ready  ## .venv with rlkernel, its tests and its linters

help:                  ## these lines
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1: \2/p' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" "numpy<2.4" $(TRITON)
	$(BIN)/python -m pip install --quiet -e ".[test,lint]"
	touch $@

setup-integrations: $(if $(INTEGRATIONS),$(VENV)/.integrations)  ## into the same .venv: what tests/integrations run on

$(VENV)/.integrations: $(VENV)/.ready integrations/requirements.txt integrations/requirements-nodeps.txt
	$(BIN)/python -m pip install --quiet -r integrations/requirements.txt "$(TORCH)" "numpy<2.4"
	$(BIN)/python -m pip install --quiet --no-deps -r integrations/requirements-nodeps.txt
	$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary transformers --dest $(VENV)/share \
	  $(SOURCES:transformers-%=transformers==%)
	cd $(VENV)/share && tar -xzf $(SOURCES).tar.gz $(SOURCES)/tests && rm $(SOURCES).tar.gz
	touch $@

chromium:              ## for the tests of the drift report; installed by apt-get where root runs this
	@command -v chromium >/dev/null || [ -n "$$CHROMIUM" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no Chromium: install it (apt-get install chromium) or set CHROMIUM to its path"

demo: setup            ## train a small model with GRPO; every sampled log-probability is compared, bit for bit
	$(BIN)/rlkernel train grpo

# MALLOC_PERTURB_: glibc fills memory that it hands out, so what reads some that nobody wrote fails every time.
test: setup setup-integrations  ## everything that runs without a GPU
	MALLOC_PERTURB_=1 $(if $(INTEGRATIONS),RLKERNEL_TEST_INTEGRATIONS=1) $(BIN)/python -m pytest -n auto -m "not gpu" $(PYTEST_ARGS)

test-gpu: setup        ## the same properties on CUDA; writes benchmarks/results/<gpu>/*.json
	$(BIN)/python benchmarks/test_gpu.py

bench: setup           ## every benchmark; writes benchmarks/results/<gpu>/*.json, then the tables
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/tables.py

sanitize: setup        ## every op under compute-sanitizer (needs a GPU); writes benchmarks/results/<gpu>/sanitize.json
	$(BIN)/python benchmarks/sanitize.py

docs: setup            ## tables of README and docs from benchmarks/results
	$(BIN)/python benchmarks/tables.py

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

site: setup $(VENV)/.docs  ## the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup            ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
