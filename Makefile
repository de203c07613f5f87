# `make demo` and `make test` are all a fresh machine needs: Python 3.11 or newer, pip, git and make.
PYTHON ?= python3
VENV ?= .venv
# Another folder or other settings for the demo: make demo RUN=runs/mhsa ARGS="model.attention.name=mhsa"
RUN ?= runs/demo
ARGS ?=
BIN := $(VENV)/bin

.PHONY: demo test check format clean

# The stamp is rewritten only when the dependency list changes, so a second `make` starts at once.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python train.py configs/demo.yaml run_dir=$(RUN) $(ARGS)
	$(BIN)/python sample.py $(RUN) --labels all --per-label 10 --columns 10 --grid $(RUN)/grid.png
	$(BIN)/python -m fid score $(RUN) --reference digits --num-images 400 --grid $(RUN)/grid.png

test: $(VENV)/.installed
	$(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
