# Two commands do everything: `make train` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
POLICY ?= auto
VENV := .venv
RUN := $(VENV)/bin
BACKENDS := tensorflow jax torch
QUICK := not debian and not slow

.PHONY: train test test-core $(BACKENDS:%=test-%) lint bench clean

train: $(VENV)/.runtime
	$(RUN)/halfwise train image --policy $(POLICY)

# Keras fixes its backend when it is imported, so each backend's tests run in a process of their own.
# Two processes at a time: none of them keeps two cores busy.
test: $(VENV)/.dev
	$(MAKE) --jobs=2 --output-sync=target test-jax test-tensorflow test-core test-torch

test-core: $(VENV)/.dev
	$(RUN)/python -m pytest -m "$(QUICK)"

$(BACKENDS:%=test-%): test-%: $(VENV)/.dev
	KERAS_BACKEND=$* TF_CPP_MIN_LOG_LEVEL=3 $(RUN)/python -m pytest -m "$(QUICK)" tests/keras tests/contract tests/workloads/keras

lint: $(VENV)/.dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

bench: $(VENV)/.dev
	for script in benchmarks/[a-z]*.py; do $(RUN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet -e ".[torch,workloads]" -c constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet torch -c constraints.txt
	$(RUN)/python -m pip install --quiet -e ".[dev]" -c constraints.txt
	touch $@
