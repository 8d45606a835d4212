# make demo   train a small mixture-of-experts model on this machine and show what it learned
# make demo-ray   the same on Ray: two trainer ranks, an engine and two environment workers
# make test   the test suite
# make slow   the tests that take long: whole demos, runs on Ray, wheels
# Every target makes the environment (.venv) first when it is missing or pyproject.toml has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_ARGS ?=
TEST_ARGS ?=

# More threads than free cores make small tensor work many times slower.
export OMP_NUM_THREADS ?= 1

.PHONY: env demo demo-ray test slow lint types imports wheel-check

env: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("onroute needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $@

demo: env
	$(BIN)/onroute demo $(DEMO_ARGS)

demo-ray: env
	$(BIN)/onroute demo --run.on=ray $(DEMO_ARGS)

test: env
	$(BIN)/python -m pytest -m 'not slow' $(TEST_ARGS)

slow: env
	$(BIN)/python -m pytest -m slow $(TEST_ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

imports: env
	$(BIN)/lint-imports

wheel-check: env
	$(BIN)/python -m pytest -m slow tests/test_house.py -k wheel
