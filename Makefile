# Everything a person needs: each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := disagg_proxy.py moriio_proxy.py kv_events_subscriber.py
CHECKED := $(wildcard $(SOURCES)) tests

.PHONY: demo test lint e2e clean

$(BIN)/.runtime: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tests/requirements.py | xargs $(BIN)/python -m pip install -q --disable-pip-version-check
	touch $@

$(BIN)/.dev: $(BIN)/.runtime
	$(BIN)/python tests/requirements.py dev | xargs $(BIN)/python -m pip install -q --disable-pip-version-check
	touch $@

lint: $(BIN)/.dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(CHECKED)

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .venv-e2e .cache
