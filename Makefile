# make demo | test | test-avx2 | check | bench | gpu-check | architectures | wheel: each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := engine envs agents baselines runs
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile

.PHONY: demo test test-avx2 check lint types bench gpu-check architectures wheel clean

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "specgym needs Python 3.11 or newer; say which with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/specgym compare --recipe demo
	$(BIN)/specgym compare --recipe demo-moe

# one process a core, each with one thread and, where a test needs them, real models
test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL)

# the engine's tests with the code of a processor that knows AVX2 and no more
test-avx2: $(INSTALLED)
	SPECGYM_CPU=x86-64-v3 $(BIN)/python -m pytest $(PARALLEL) tests/engine

check: lint types test

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow an editable install whose folders have other names: it gets links.
types: $(INSTALLED)
	mkdir -p build/typecheck/specgym
	for package in $(PACKAGES); do ln -sfn ../../../$$package build/typecheck/specgym/$$package; done
	$(BIN)/mypy

bench: $(INSTALLED)
	mkdir -p build
	$(BIN)/specgym bench decode --json build/bench-decode.json

# exits with 3 (make says so) where there is no CUDA device
gpu-check: $(INSTALLED)
	mkdir -p build
	$(BIN)/specgym bench gpu --json build/bench-gpu.json
	$(BIN)/python -m pytest -m gpu

# docs/architectures.md, from the tests that pass
architectures: $(INSTALLED)
	$(BIN)/python -m pytest tests/engine/forward/test_architectures.py --write-docs

wheel: $(INSTALLED)
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist
