# `make demo` and `make test` set everything up by themselves in .venv; nothing else is needed but
# Python 3.11 or newer. PYTHON=python3.12 make test picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench docs docs-numbers clean

demo: $(READY)
	$(BIN)/fedcohort compare --out demo --resume

test: lint  # a thread for each worker, or they fight over the cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/simulation.py --quick --out runs/bench/simulation.json
	$(BIN)/python benchmarks/sketching.py --repeats 1 --out runs/bench/sketching.json
	$(BIN)/python benchmarks/selection.py --out runs/bench/selection.json

docs-numbers: $(READY)  # tables of README and docs from benchmarks/results
	$(BIN)/python benchmarks/docs_numbers.py

docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet

$(READY): requirements.lock pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $(READY)

clean:
	rm -rf $(VENV) demo runs
