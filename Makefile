# The two commands of the README are `make serve` and `make test`; everything they need is made here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test test-deep check format dev clean

serve: $(VENV)/.installed
	$(BIN)/minidsa serve $(ARGS)

test: dev
	$(BIN)/python -m pytest -q -m "not gpu and not deep" $(ARGS)

# The long versions of the equality grids: minutes instead of seconds.
test-deep: dev
	$(BIN)/python -m pytest -q -m "deep and not gpu" $(ARGS)

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# uv looks at the machine and takes torch's CPU or CUDA build; where it cannot, pip decides.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt uv
	UV_HTTP_RETRIES=0 $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=auto \
		-c constraints.txt torch || $(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e .[dev]
	mkdir -p .typing/minidsa
	for package in attention configs kv_cache model scheduler server; do \
		ln -sfn ../../$$package .typing/minidsa/$$package; done
	touch $@

dev: $(VENV)/.dev

clean:
	rm -rf $(VENV) .typing build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
