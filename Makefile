# Everything happens in .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One single-threaded process per core: threads of several torch processes would fight.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal
READY := $(VENV)/.ready

.PHONY: demo test check lint format bench oldest peers clean

demo: $(READY)
	$(BIN)/treeopt demo

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m benchmarks.build
	$(BIN)/python -m benchmarks.calibrate
	$(BIN)/python -m benchmarks.decode

# The same tests on the oldest supported transformers.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --requirement requirements-dev.txt
	.venv-oldest/bin/pip install --quiet transformers==4.57.6
	.venv-oldest/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	OMP_NUM_THREADS=1 .venv-oldest/bin/pytest --numprocesses auto --dist worksteal -m "not slow"

# Other engines for benchmarks.decode, each in an environment of its own.
peers:
	$(PYTHON) -m venv .venv-peers/llama_cpp
	.venv-peers/llama_cpp/bin/pip install --quiet xllamacpp==2026.10.11549

$(READY): requirements.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info
