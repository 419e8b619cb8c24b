# Every way to run this project; needs make and a Python that can make environments, nothing else.

# Asked for only by the recipes that need it, since looking starts interpreters.
PYTHON ?= $(shell sh tools/find-python.sh)
VENV := .venv
# Processes that share the tests. Each keeps eight virtual devices busy, so few cores are soon full.
JOBS ?= 2
# Neighbours stay together, since they share what is compiled; who is done early takes of the rest.
SHARED := -n $(JOBS) --dist worksteal
# Appended to every pytest command line, such as PYTEST_ARGS="-k groups -x".
PYTEST_ARGS ?=
# What to bench, such as BENCH="update --rounds 30"; everything if empty.
BENCH ?=
# Which faults to plant, parts of their names, such as MUTANTS="pipeline/ groups"; all if empty.
MUTANTS ?=
# Steps of each soak test.
SOAK_STEPS ?= 20000
# How often the runs of `make chaos` are killed, and half as many stalls.
CYCLES ?= 100

.DEFAULT_GOAL := help
.PHONY: help environment demo test test-deep check mutants test-matrix soak chaos bench bench-peers bench-pods bench-gpus constraints clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

environment:  ## build .venv, if it is not there or not up to date
	@python="$(PYTHON)"; [ -n "$$python" ] && "$$python" tools/environment.py $(VENV)

demo: environment  ## train a small model on eight virtual CPU devices
	$(VENV)/bin/python -m examples.byte_lm

test: environment  ## run the tests, in ten minutes on two cores
	$(VENV)/bin/python -m pytest $(SHARED) $(PYTEST_ARGS)

test-deep: environment  ## run the tests that make test leaves out
	$(VENV)/bin/python -m pytest $(SHARED) -m "deep and not soak" $(PYTEST_ARGS)

check: environment  ## lint, formatting, types, and which folder may import which
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

mutants: environment  ## plant faults in the package, and see which of them make test catches
	$(VENV)/bin/python tools/mutants.py --jobs $(JOBS) $(MUTANTS)

test-matrix:  ## the suite on Python 3.11 to 3.13, with the oldest and the newest JAX
	@python="$(PYTHON)"; [ -n "$$python" ] && "$$python" tools/matrix.py $(SHARED) $(PYTEST_ARGS)

soak: environment  ## the long runs: make soak SOAK_STEPS=20000
	SOAK_STEPS=$(SOAK_STEPS) $(VENV)/bin/python -m pytest -m soak $(PYTEST_ARGS)

chaos: environment  ## kill, resume and stall runs at random moments: make chaos CYCLES=100
	SOAK_STEPS=$$((200 * $(CYCLES))) $(VENV)/bin/python -m pytest -m soak -n 0 $(PYTEST_ARGS) \
	  tests/examples/byte_lm/test_chaos.py tests/distributed/test_watch.py

bench: environment  ## measure against baselines written by hand, and against peers that are there
	$(VENV)/bin/python -m benchmarks $(BENCH)

bench-peers:  ## build the environments of PyTorch and TensorFlow for the bench
	@python="$(PYTHON)"; [ -n "$$python" ] && "$$python" tools/bench_peers.py

bench-pods: environment  ## compile steps for TPU pods, and write down what they send
	$(VENV)/bin/python -m pip -qq --disable-pip-version-check install "jax[tpu]"
	$(VENV)/bin/python -m benchmarks.pods

bench-gpus:  ## compile steps for H100 clusters (installs 5 GB), and write down what hides
	@python="$(PYTHON)"; [ -n "$$python" ] && \
	  "$$python" tools/environment.py .venvs/gpus --extras examples
	.venvs/gpus/bin/python -m pip -qq --disable-pip-version-check install "jax[cuda12]"
	.venvs/gpus/bin/python -m benchmarks.gpus

constraints:  ## resolve and rewrite constraints/ for every Python that is here
	@python="$(PYTHON)"; [ -n "$$python" ] && "$$python" tools/constraints.py

clean:  ## remove the environments and all that tools left behind
	rm -rf $(VENV) .venvs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
