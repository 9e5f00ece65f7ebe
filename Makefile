# Everything runs in an environment of its own, .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help install test test-all lint families quickstart quickstart-heads results

help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 30

install: $(STAMP)  ## Make .venv with the pinned dependencies (again only when they change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "drafttrain needs Python 3.11 or newer, but $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1); use: make install PYTHON=python3.11" >&2; exit 1; }
	@echo "Installing into .venv ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@start=$$(date +%s) && \
	  $(BIN)/python -m pip install --quiet -c constraints.txt torch && \
	  $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' && \
	  echo "Installed in $$(( $$(date +%s) - start )) s"
	@touch $(STAMP)

lint: $(STAMP)  ## Check style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

PYTEST = OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test: lint  ## Check style, run the tests of laws and parts, one process a core (5 min on 2 cores)
	@$(PYTEST) -m "not end_to_end"

test-all: lint  ## Every test: commands, recipes, launches, pages, all cases of the laws too (10 to 30 min)
	@$(PYTEST)

families: $(STAMP)  ## Try every model class of Transformers, write docs/models.md (1 to 2 min)
	@OMP_NUM_THREADS=1 $(BIN)/python docs/make_models.py

quickstart: $(STAMP)  ## Distil, train and measure a small drafter on the embedded data (10 min)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/quickstart.sh

quickstart-heads: $(STAMP)  ## Train acceptance heads for the embedded GSM8K pair, measure (6 to 11 min)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/quickstart_heads.sh

results: quickstart quickstart-heads  ## Measure all tables of docs/results.md that need no other data (1 h)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/results.sh
