# Two commands do everything: `make train` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
POLICY ?= auto
VENV := .venv
RUN := $(VENV)/bin

.PHONY: train test lint bench clean

train: $(VENV)/.runtime
	$(RUN)/halfwise train image --policy $(POLICY)

test: $(VENV)/.dev
	$(RUN)/python -m pytest -m "not debian and not slow"

lint: $(VENV)/.dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

bench: $(VENV)/.dev
	for script in benchmarks/*.py; do $(RUN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet -e ".[torch,workloads]" -c constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet -e ".[dev]" -c constraints.txt
	touch $@
