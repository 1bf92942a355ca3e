# `make demo` and `make test` set everything up by themselves in .venv; nothing else is needed but
# Python 3.11 or newer. PYTHON=python3.12 make test picks another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Keep bytecode: the tests start many processes, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

SOAK ?= 900
JOBS ?= 2

.PHONY: demo test suite soak soak-tests soak-kills soak-load soak-fuzz soak-audit browser lint bench docs docs-numbers lock clean

demo: $(READY)
	$(BIN)/fedcohort compare --seeds 5 --out demo --resume
	$(BIN)/fedcohort report demo -o demo/report.html

test: browser  # the types are checked while the tests run
	@$(MAKE) --no-print-directory -j 2 lint suite

# One thread per worker, or they fight over the cores. conftest.py puts the longest files first.
suite: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# The tests of reports need a browser. Without one they are skipped; if CI is set, they fail.
browser:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
	&& echo "Installing Chromium by apt-get, for the tests of reports" && apt-get update -qq \
	&& apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null; } \
	|| echo "No Chromium: tests in a browser are skipped (apt-get install chromium)"

# Kills, load, damaged files, attacks on private mechanisms, and surroundings, each for SOAK seconds
# at most; docs/reliability.md says what must hold. A step that fails does not stop the others.
SOAKED := OMP_NUM_THREADS=1 $(BIN)/python tests/soak
soak: $(READY)
	@$(MAKE) --no-print-directory -k soak-tests soak-kills soak-load soak-fuzz soak-audit
soak-tests:
	$(BIN)/python -m pytest -q tests/soak/test_environment.py tests/soak/test_writers.py
soak-kills soak-load soak-fuzz:
	$(SOAKED)/$(@:soak-%=%).py --seconds $(SOAK) --out runs/soak/$(@:soak-%=%).json
soak-audit:
	$(SOAKED)/audit.py --jobs $(JOBS) --out runs/soak/audit.json

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/simulation.py --workloads W1 --out runs/bench/simulation.json
	$(BIN)/python benchmarks/sketching.py --repeats 1 --out runs/bench/sketching.json
	$(BIN)/python benchmarks/selection.py --out runs/bench/selection.json

docs-numbers: $(READY)  # tables of README and docs from benchmarks/results
	$(BIN)/python benchmarks/docs_numbers.py

docs: $(READY)
	$(BIN)/mkdocs build --strict

# The newest versions that fit together, but for two: a plain torch is a gigabyte of CUDA, and newer
# flwr does not install beside this Typer.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 "flwr<1.42" ".[dev]"
	{ head -n 2 requirements.lock; .venv-lock/bin/python -m pip freeze --all --exclude fedcohort --exclude pip; } > lock.new
	mv lock.new requirements.lock
	rm -rf .venv-lock

$(READY): requirements.lock pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $(READY)

clean:
	rm -rf $(VENV) demo runs
