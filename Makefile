# Everything runs in .venv, which the first target to need it creates with plain venv and pip.
PYTHON ?= python3
BIN := .venv/bin
DEMO_READY := .venv/.ready-demo
READY := .venv/.ready

.PHONY: demo test test-slow check audit docs docs-tables format clean

demo: $(DEMO_READY)
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

# The documentation site in site/; a broken link fails.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html. Its search needs a server: python3 -m http.server --directory site"

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

# What the demo needs: the library and the report's interactive figures.
$(DEMO_READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once; PyTorch is large, this takes some minutes) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[report]"
	@touch $@

# Everything else, added to the same .venv.
$(READY): $(DEMO_READY)
	@echo "Adding what tests and development need to .venv (once) ..."
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	@touch $@
