# Everything a person needs: each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard disagg_proxy.py moriio_proxy.py kv_events_subscriber.py)
CHECKED := $(SOURCES) tests
SCRIPTS := $(wildcard *.sh) .ci/run
PIP := xargs $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo demo-moriio test lint soak fuzz docs bench dropin e2e clean

# Two prefill and two decode engines (simulated), the proxy, one streamed answer.
# KEEP=1 goes on until Ctrl-C.
demo: $(BIN)/.runtime
	@$(BIN)/python tests/demo.py $(if $(KEEP),--keep)

# The same with engines that register themselves.
demo-moriio: $(BIN)/.runtime
	@$(BIN)/python tests/demo_moriio.py

# Four processes: the tests wait more than they compute.
test: lint
	$(BIN)/python -m pytest -n 4 --dist worksteal

# shellcheck's exceptions are vLLM's.
lint: $(BIN)/.dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(CHECKED)
	$(BIN)/shellcheck -s bash -e SC1091,SC2004,SC2129,SC2155,SC2164 $(SCRIPTS)
	$(BIN)/python tests/six_numbers.py $(SOURCES)

# Waits of minutes, hundreds of repetitions.
soak: $(BIN)/.dev
	$(BIN)/python -m pytest -m soak
	$(BIN)/python tests/soak.py

# Thirty times the examples of all properties, and new ones: ten minutes.
fuzz: $(BIN)/.dev
	FUZZ_FACTOR=30 $(BIN)/python -m pytest tests/test_oracle.py tests/test_fuzz_*.py

# Writes the tables of README.md and tests/README.md anew.
docs: $(BIN)/.dev
	$(BIN)/python tests/docs.py

# Side by side with other proxies: a quarter of an hour. QUICK=1: one short round.
# VLLM=path: vLLM's demo too. haproxy and nginx take part where they are installed:
# apt-get install haproxy nginx-light
bench: $(BIN)/.runtime .cache/bench/.ready
	@$(BIN)/python tests/bench/compare.py $(if $(QUICK),--quick) \
	    --vllm "$(or $(VLLM),$(VLLM_SOURCE))"

# One by one: not everybody can be had everywhere.
.cache/bench/.ready: pyproject.toml
	@echo "Setting up .cache/bench"
	@$(PYTHON) -m venv .cache/bench
	@$(BIN)/python tests/requirements.py bench | xargs -n 1 .cache/bench/bin/python \
	    -m pip install -qq --disable-pip-version-check || echo "Some are missing"
	@touch $@

# Copies the scripts into a vLLM source tree, and has it judge them.
dropin: $(BIN)/.dev
	@$(BIN)/python tests/dropin.py "$(or $(VLLM),$(error \
	    make dropin VLLM=path, the top of a vLLM source tree))"

$(BIN)/.runtime: pyproject.toml
	@echo "Setting up $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tests/requirements.py | $(PIP)
	@touch $@

$(BIN)/.dev: $(BIN)/.runtime
	@echo "Adding the development packages to $(VENV)"
	@$(BIN)/python tests/requirements.py dev | $(PIP)
	@touch $@

# The real engine has its own environment: 2.2 GB. E2E_OPTIONAL=1 passes without it.
.venv-e2e/.ready: pyproject.toml $(wildcard tests/e2e/*.txt) tests/e2e/install.py
	$(PYTHON) tests/e2e/install.py .venv-e2e
	touch $@

e2e:
	@if $(MAKE) -s --no-print-directory .venv-e2e/.ready; then \
	    .venv-e2e/bin/python -m pytest --confcutdir=tests/e2e tests/e2e; \
	elif [ "$(E2E_OPTIONAL)" = 1 ]; then \
	    echo "e2e: not run, the engine cannot be installed here (see above)"; \
	else exit 1; fi

clean:
	rm -rf $(VENV) .venv-e2e .cache
