# Every target sets up .venv by itself; when it is there and nothing changed, that takes no time.
PYTHON ?= python3
BIN := .venv/bin
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all check bench wheel clean
.DEFAULT_GOAL := test

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready  ## the default model, then the whole path on embedded text: vocabulary, corpus, training, report
	rm -rf demo
	$(BIN)/bertsmith demo --out demo

test: .venv/ready  ## the test suite
	$(BIN)/python -m pytest -m 'not slow' $(SIDE_BY_SIDE)

test-all: test  ## the test suite and the slow tests
	$(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE)

check: .venv/ready  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/ready  ## the benchmarks that run without an accelerator
	$(BIN)/python -m benchmarks.run

wheel: .venv/ready  ## build the package
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf .venv dist demo .mypy_cache .ruff_cache .pytest_cache
