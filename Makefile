# make demo and make test set everything up from an empty clone: Python 3.11 or newer, pip and a C++ compiler are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes of a test run: one a core, two to four.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell n=$(CORES); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
ARGS ?=

export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all test-gpu lint format graphs bench docs clean

help:
	@echo "make demo      decode from a paged KV cache through one compiled graph (ARGS='--trace FILE ...')"
	@echo "make test      lint, types and every test that needs no GPU"
	@echo "make test-all  the same with 2,000 interpreted examples for each operator"
	@echo "make test-gpu  the tests for a CUDA device, in the environment of PYTHON=python3"
	@echo "make lint      ruff and mypy alone; make format applies ruff's layout"
	@echo "make graphs    accept the captured graphs as the new goldens"
	@echo "make bench     timings on a CUDA device, in the environment of PYTHON=python3"
	@echo "make docs      build the pages of docs/ into build/docs"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

demo: $(READY)
	OMP_NUM_THREADS=$(WORKERS) $(BIN)/python -m compiled_kv demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: lint
	COMPILED_KV_EXAMPLES=2000 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu $(ARGS)

graphs: $(READY)
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest tests/test_graphs.py tests/test_models.py -k "test_graphs or traced_for_cuda"

bench:
	$(PYTHON) -m compiled_kv.bench $(ARGS)

docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --site-dir build/docs

clean:
	rm -rf $(VENV) build
