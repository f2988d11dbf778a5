# Needs Python 3.11 or later, gcc and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
CORE := setup.py $(wildcard src/phalanx/comm/shm/core/*.[ch])
# Tests and local ranks share the cores: one thread each is faster than many that wait for one another.
export OMP_NUM_THREADS ?= 1
# `make train ARGS="--steps 50 --mesh dp=4"`
ARGS ?=

.PHONY: setup train test nightly lint

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt $(CORE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/phalanx train --model llama-tiny --mesh dp=2,tp=2 --steps 200 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	@start=$$(date +%s); status=0; \
	$(MAKE) --no-print-directory lint && $(BIN)/python -m pytest -n 2 --durations=10 -m "not nightly" || status=$$?; \
	echo "make test: $$(($$(date +%s) - start)) s in total, exit $$status"; exit $$status

nightly: setup
	$(BIN)/python -m pytest -n 2 --durations=20 --timeout 1800
