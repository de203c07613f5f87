# `make demo` and `make test` are all that a fresh machine needs: Python 3.11 or newer, pip, git and make.
PYTHON ?= python3
VENV ?= .venv
# Another folder or other settings for the demo: make demo RUN=runs/mhsa ARGS="model.attention.name=mhsa"
RUN ?= runs/demo
ARGS ?=
BIN := $(VENV)/bin

.PHONY: demo test check format

# The stamp is as old as the last change of the dependency list, so a second `make` starts at once.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python train.py configs/demo.yaml run_dir=$(RUN) $(ARGS)
	$(BIN)/python sample.py $(RUN) --labels all --per-label 10 --grid $(RUN)/grid.png
	$(BIN)/python -m fid score $(RUN) --reference digits --num-images 400 --out $(RUN)/score.json

test: $(VENV)/.installed
	$(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
