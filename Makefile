# Set-up and the commands that are run every day. Another Python: make PYTHON=python3.12 train

PYTHON ?= python3
ARGS ?=
# One more than cores: tests wait for processes, disks and clocks; each worker costs its imports.
WORKERS ?= 3
BIN := .venv/bin
SETUP := pyproject.toml constraints.txt
# --no-compile: to compile all that is installed takes half a minute, and most is never imported.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt

.PHONY: help train test doctor clean

help:
	@echo "make train    set up .venv and run phalanx train (make train ARGS='--steps 50')"
	@echo "make test     set up .venv and run the formatter, the linter, the type checker and pytest"
	@echo "make doctor   set up .venv and show what this machine has"
	@echo "make clean    remove .venv and caches (not runs/)"

train: .venv/ready
	@$(BIN)/phalanx train $(ARGS)

doctor: .venv/ready
	@$(BIN)/phalanx doctor $(ARGS)

test: .venv/ready-to-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# The type checker computes on one core: beside pytest, and heard when pytest has ended.
	@types=$$(mktemp); \
	$(BIN)/basedpyright --pythonpath $(BIN)/python >"$$types" 2>&1 & checker=$$!; \
	trap 'kill $$checker 2>/dev/null; rm -f "$$types"' EXIT; \
	trap 'exit 130' INT TERM; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS); tests=$$?; \
	wait $$checker; checked=$$?; \
	cat "$$types"; \
	exit $$(( tests ? tests : checked ))

# The stamps are newer than what they were made from, so set-up happens once, and again when
# pyproject.toml or constraints.txt change.
.venv/ready: $(SETUP) | $(BIN)/python
	@echo "installing phalanx into .venv (the first time takes a few minutes)"
	$(PIP) -e .
	@touch $@

.venv/ready-to-test: $(SETUP) | $(BIN)/python
	@echo "installing phalanx and its test tools into .venv (the first time takes a few minutes)"
	$(PIP) -e '.[test]'
	@# Hundreds of processes import these. Some files of torch are templates, which do not compile.
	@cd $(BIN)/../lib/python3*/site-packages && ../../../bin/python -m compileall -q -j 0 torch sympy \
	  >/dev/null 2>&1 || true
	@touch .venv/ready $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)'; name a Python 3.11 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: phalanx needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	    "name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' lacks its venv module; on Debian and Ubuntu: apt install python3-venv;" \
	    "or name another Python: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	@rm -rf .venv
	$(PYTHON) -m venv .venv
	@# The pip that a Python brings may be years old: 23.2 takes 40 s for .[test], 26.3 takes 31 s.
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade pip || true

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
