# `make demo` runs the main job, `make test` the tests; both set up .venv first and reuse it after.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell cat requirements.txt pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: demo test test-parallel checks verify-full clean

demo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore::UserWarning tools/demo.py

# One thread a worker: the models are tiny, and threads that wait for each other cost more than they compute.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxschedchunk 1

# The whole matrix of parallel axes, all forests on all layouts: about an hour on two cores.
test-parallel: $(INSTALLED)
	OMP_NUM_THREADS=1 MEGATRON_DTA_CELLS=all $(BIN)/python -m pytest -n 1 tests/parallel

checks: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Hours on a small machine: all recorded rollouts that the tests only sample.
verify-full: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m full tests/test_recorded.py -s

$(INSTALLED): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-*
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
