# Every way to run this project; needs make and a Python that can make environments, nothing else.

# Asked for only by the recipes that need it, since looking starts interpreters.
PYTHON ?= $(shell sh tools/find-python.sh)
VENV := .venv
# Says that it is up to date, in this folder: an environment that was moved still runs the other's.
READY := $(VENV)/ready-$(shell pwd | cksum | cut -d ' ' -f 1)
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
.PHONY: help environment demo test test-deep check mutants test-matrix soak chaos bench bench-peers bench-pods bench-gpus bench-gpu docs docs-serve docs-browse tutorial notebook release constraints clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

environment: $(READY)  ## build .venv, if it is not there or not up to date
	@$(VENV)/bin/python -c 'from importlib.metadata import version; from platform import python_version; \
	  print("$(VENV) has Python", python_version(), "and JAX", version("jax"))'

$(READY): pyproject.toml $(wildcard constraints/*.txt)
	@[ -f $@ ] || { python="$(PYTHON)"; [ -n "$$python" ] && "$$python" -m venv --clear $(VENV); }
	@pins=constraints/$$($(VENV)/bin/python -c \
	    'import sys; print("py%d%d-newest.txt" % sys.version_info[:2])'); \
	  [ -f $$pins ] || pins=/dev/null; echo "installing into $(VENV) with $$pins (about a minute) …"; \
	  $(VENV)/bin/python -m pip -qq --disable-pip-version-check install --no-compile -c $$pins -e ".[test,dev]"
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip compiles on one core
	@touch $@

demo: environment  ## train a small model on eight virtual CPU devices
	$(VENV)/bin/python -m examples.byte_lm --optimizer muon --schedule cosine --steps 700

test: environment  ## run the tests, in six to eight minutes on two cores
	$(VENV)/bin/python -m pytest $(SHARED) $(PYTEST_ARGS)

test-deep: environment  ## run the tests that make test leaves out (installs Ray, 0.5 GB)
	$(VENV)/bin/python -m pip -qq --disable-pip-version-check install -r constraints/ray.txt -r constraints/notebook.txt
	$(VENV)/bin/python -m pytest $(SHARED) -m "deep and not soak" $(PYTEST_ARGS)

check: environment  ## lint, formatting, types, and which folder may import which
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

mutants: environment  ## plant faults in the package, and see which of them make test catches
	$(VENV)/bin/python tools/mutants.py --jobs $(JOBS) $(MUTANTS)

test-matrix: environment  ## the suite on Python 3.11 to 3.13, with the oldest and the newest JAX
	$(VENV)/bin/python -m nox -s tests -- $(SHARED) $(PYTEST_ARGS)

soak: environment  ## the long runs: make soak SOAK_STEPS=20000
	SOAK_STEPS=$(SOAK_STEPS) $(VENV)/bin/python -m pytest -m soak $(PYTEST_ARGS)

chaos: environment  ## kill, resume and stall runs at random moments: make chaos CYCLES=100
	SOAK_STEPS=$$((200 * $(CYCLES))) $(VENV)/bin/python -m pytest -m soak -n 0 $(PYTEST_ARGS) \
	  tests/examples/byte_lm/test_chaos.py tests/examples/byte_lm/test_comes_back.py \
	  tests/distributed/test_watch.py tests/distributed/test_keep_programs.py

bench: environment  ## measure against baselines written by hand, and against peers that are there
	$(VENV)/bin/python -m benchmarks $(BENCH)

bench-peers: environment  ## build the environments of PyTorch and TensorFlow for the bench
	$(VENV)/bin/python -m nox -s peer

bench-pods: environment  ## compile steps for TPU pods, and write down what they send
	$(VENV)/bin/python -m pip -qq --disable-pip-version-check install "jax[tpu]"
	$(VENV)/bin/python -m benchmarks.pods

bench-gpus: environment  ## compile steps for H100 clusters (installs 5 GB), and write down what hides
	$(VENV)/bin/python -m nox -s gpus -- $(BENCH)

bench-gpu:  ## measure on this machine's GPU, with the Python that has JAX for CUDA (PYTHON=…)
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu $(BENCH)

docs: environment  ## build the site, in site/; what does not fit together is an error
	$(VENV)/bin/python -m nox -s docs

docs-serve: environment  ## show the site at http://127.0.0.1:8000, as it is written
	$(VENV)/bin/python -m nox -s docs -- serve

docs-browse: docs  ## open all pages of the site in Chromium, which must be there
	$(VENV)/bin/python -m nox -s docs -- browse

tutorial: environment  ## follow the tutorial word by word, in an empty environment
	pins=$$PWD/constraints/$$($(VENV)/bin/python -c \
	    'import sys; print("py%d%d-newest.txt" % sys.version_info[:2])'); \
	  PIP_CONSTRAINT=$$pins $(VENV)/bin/python tools/follow.py --clone . docs/tutorial/*.md

notebook: environment  ## make a notebook for Kaggle and Colab of examples/notebook.py, and its wheel
	$(VENV)/bin/python -m nox -s notebook

release: environment  ## build the wheel and the source distribution, and try them in empty environments
	$(VENV)/bin/python -m nox -s release

constraints: environment  ## resolve and rewrite constraints/ for every Python that is here
	$(VENV)/bin/python -m nox -s constraints

clean:  ## remove the environments and all that tools left behind
	rm -rf $(VENV) .venvs build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
