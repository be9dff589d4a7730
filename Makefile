# Everything runs in .venv, which the first target to need it creates with plain venv and pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow check audit docs-tables format clean

demo: $(READY)
	$(BIN)/mergestream demo --out demo

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu"

test-slow: $(READY)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n auto -m "not gpu" tests/test_properties.py tests/test_merging.py
	$(BIN)/python -m pytest -m "slow and not gpu"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tables and figures of docs/results.md and the README, from the committed records.
docs-tables: $(READY)
	$(BIN)/python scripts/docs_tables.py

# Known vulnerabilities of the versions in constraints.txt. Not part of CI: it asks the package index, so its result depends on the
# day; without an index that has such data, --strict makes it fail.
audit: $(READY)
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once; PyTorch is large, this takes some minutes) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	@touch $@
