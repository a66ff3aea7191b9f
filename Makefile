# Everything a user runs: `make demo`, `make test`. Each makes the environment first where it is
# missing or out of date; nothing but Python 3.11 and make need be installed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A file's tests share a process, as they share what is costly to set up; those of tests/machines and
# tests/chaos do not. What takes longest begins first (tests/conftest.py). Compiled files are kept for
# the next process, even where the environment says otherwise: half of the collection is compiling.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder

.PHONY: help setup demo test test-slow test-gpu lint format clean

help:
	@echo "make setup     make .venv with everything that is needed"
	@echo "make demo      the main job end to end on an embedded corpus, about 4 minutes on 2 cores"
	@echo "make test      the fast tests, 3 to 6 minutes on 2 cores"
	@echo "make test-slow runs that are killed and continue, machines, kernels for GPUs: about 20 minutes"
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
	$(BIN)/zeroclap demo

# Some tests wait more than they compute, so there are more processes than cores.
test: $(READY)
	$(PYTEST) -n 3 -m "not slow"

# Tests of several machines need root and the packages that .ci/run installs; those of kernels need
# g++, and fetch Triton once (0.7 GB). They skip, and say so, without.
test-slow: $(READY)
	$(PYTEST) -n 3 -rs -m slow

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
