# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv first. `make help` lists all.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build of torch where no NVIDIA driver is found; TORCH=... overrides it.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11" || echo "torch==2.13.0")
# The version of the tests and the GPU figures. pip therefore skips CUDA builds of torch that need another one.
TRITON ?= triton==3.6.0
PYTEST_ARGS ?=
# vLLM for CPUs, TRL and transformers at fixed versions, for tests/integrations; not with a CUDA build of torch.
INTEGRATIONS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || echo yes)
# The source distribution of transformers contains its tests of models, which tests/integrations/peers runs.
SOURCES := $(shell sed -n 's/^transformers==/transformers-/p' integrations/requirements.txt)

# verl wants an older transformers than TRL's tests.
VERL_VENV ?= .venv-verl

.PHONY: help demo learn-images test test-verl test-matrix test-gpu bench sanitize docs site lint setup setup-integrations setup-verl chromium clean

setup: $(VENV)/.ready  ## .venv with rlkernel, its tests and its linters

help:                  ## list all targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1: \2/p' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" "numpy<2.4" $(TRITON)
	$(BIN)/python -m pip install --quiet -e ".[test,lint]"
	touch $@

setup-integrations: $(if $(INTEGRATIONS),$(VENV)/.integrations)  ## vLLM, TRL and transformers for tests/integrations, in the same .venv

$(VENV)/.integrations: $(VENV)/.ready integrations/requirements.txt integrations/requirements-vllm.txt integrations/requirements-nodeps.txt
	$(BIN)/python -m pip install --quiet -r integrations/requirements.txt "$(TORCH)" "numpy<2.4"
	$(BIN)/python -m pip install --quiet --no-deps -r integrations/requirements-nodeps.txt torchvision==0.28.0
	$(BIN)/python -c "import torchvision" 2>/dev/null || $(BIN)/python integrations/torchvision_on_cpu.py
	$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary transformers --dest $(VENV)/share \
	  $(SOURCES:transformers-%=transformers==%)
	cd $(VENV)/share && tar -xzf $(SOURCES).tar.gz $(SOURCES)/tests && rm $(SOURCES).tar.gz
	touch $@

setup-verl: $(VERL_VENV)/.ready  ## verl and vLLM for CPUs in .venv-verl, for tests/integrations/verl

$(VERL_VENV)/.ready: pyproject.toml $(wildcard integrations/requirements-*.txt)
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet torch==2.13.0 "numpy<2.4" $(TRITON)
	$(VERL_VENV)/bin/python -m pip install --quiet -r integrations/requirements-verl.txt torch==2.13.0 "numpy<2.4"
	$(VERL_VENV)/bin/python -m pip install --quiet -e . pytest torch==2.13.0 "numpy<2.4"
	$(VERL_VENV)/bin/python -m pip install --quiet --no-deps -r integrations/requirements-verl-nodeps.txt
	touch $@

chromium:              ## for the tests of the drift report; apt-get installs it if the user is root
	@command -v chromium >/dev/null || [ -n "$$CHROMIUM" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no Chromium: install it (apt-get install chromium) or set CHROMIUM to its path"

demo: setup            ## train a small model with GRPO; every sampled log-probability is compared, bit for bit
	$(BIN)/rlkernel train grpo

learn-images: setup setup-integrations  ## learn a task of images with rlkernel and with TRL, five minutes each at most
	$(BIN)/python benchmarks/learn_images.py

# MALLOC_PERTURB_: glibc fills allocated memory, so that a read of uninitialised memory fails every time.
test: setup setup-integrations  ## everything that runs without a GPU
	MALLOC_PERTURB_=1 $(if $(INTEGRATIONS),RLKERNEL_TEST_INTEGRATIONS=1) $(BIN)/python -m pytest -n auto -m "not gpu" $(PYTEST_ARGS)

test-verl: setup-verl  ## rlkernel_verl under verl's Ray trainer with vLLM, on CPUs; ten minutes on two cores
	$(VERL_VENV)/bin/python -m pytest tests/integrations/verl $(PYTEST_ARGS)

test-matrix: setup setup-integrations  ## vLLM on 1, 2 and 4 ranks against trainers on 1, 2 and 4, on CPUs; writes the record of its table
	RLKERNEL_TEST_MATRIX=1 $(BIN)/python benchmarks/test_integrations.py --name matrix tests/integrations/vllm/test_vllm_tensor_parallel.py

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
