# draftwood: `make demo` shows it, `make test` checks it. Both build .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run tiny models: one thread each is fastest, and OpenMP with more stalls on a busy machine.
TEST_THREADS ?= 1
PYTEST_ARGS ?=
# Compiling every module of torch takes minutes; Python compiles the few that are used by itself.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check

.PHONY: demo test lint docs clean help

help:
	@echo "make demo   generate with a real model, plainly and accelerated, and compare"
	@echo "make test   run the tests   (PYTEST_ARGS='-k tree' to select)"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation site, in site/"
	@echo "make clean  remove .venv and caches"

demo: $(VENV)/.demo
	$(BIN)/draftwood demo

test: $(VENV)/.test
	OMP_NUM_THREADS=$(TEST_THREADS) MKL_NUM_THREADS=$(TEST_THREADS) TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Any warning fails. The reference is read from the sources.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(PYTHON) -m http.server --directory site"

# The virtual environment, remade when pyproject.toml changes. Without an NVIDIA GPU torch is
# pinned first, to a release that package indexes with CPU-only builds carry; where that release
# cannot be had, any supported one does.
$(VENV)/.torch: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "draftwood needs Python 3.10 or newer, '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
		echo "Name another one:  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@echo "Setting up $(VENV); this takes a minute or more ..."
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
		$(PIP_INSTALL) 'torch>=2.9'; \
	else \
		$(PIP_INSTALL) 'torch==2.13.0' || $(PIP_INSTALL) 'torch>=2.9'; \
	fi
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	$(PIP_INSTALL) --editable '.[gguf]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.torch
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
