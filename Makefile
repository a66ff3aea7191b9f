# Everything a user runs: `make demo`, `make test`. Each makes the environment first where it is
# missing or out of date; nothing but Python 3.11 and make need be installed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes that run tests; a file's tests share one, as they share what is costly to set up. The files
# begin in the order of tests/conftest.py: those that take longest first.
WORKERS := 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test test-slow test-long test-machines test-all \
	rehearse-gpu test-gpu lint format clean

help:
	@echo "make setup     make .venv with everything that is needed"
	@echo "make demo      the main job end to end on an embedded corpus, about 4 minutes on 2 cores"
	@echo "make test      the fast tests, about 6 minutes on 2 cores"
	@echo "make test-slow runs that are killed and continue, compiled models: about 20 minutes"
	@echo "make test-long the commands of the guides, the demo and others of several minutes each"
	@echo "make test-all  all three"
	@echo "make test-machines  runs on hosts with sshd and Slurm, made of namespaces; needs root"
	@echo "make rehearse-gpu  the GPU path without a GPU: DeepSpeed on fake tensors, kernels compiled and interpreted"
	@echo "make test-gpu  the tests that need a GPU, at most 8 minutes on one; they skip where there is none"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove .venv and what the demo made"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m finetune demo

test: $(READY)
	$(PYTEST) -m "not slow and not long and not machines and not rehearsal"

test-slow: $(READY)
	$(PYTEST) -m "slow and not long"

test-long: $(READY)
	$(PYTEST) -m long

# Without root or the packages that .ci/run installs they skip, and say so.
test-machines: $(READY)
	$(BIN)/python -m pytest -rs tests/machines

test-all: test test-slow test-long

# Needs g++, and fetches Triton once (0.7 GB); skips, and says so, without.
rehearse-gpu: $(READY)
	$(BIN)/python -m pytest -rs tests/gpu/rehearsal

test-gpu: $(READY)
	bash tests/gpu/test.sh $(BIN)/python

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo-output
