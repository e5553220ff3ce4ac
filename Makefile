# The two commands of the README are `make serve` and `make test`; everything they need is made here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test test-unit test-deep sweep drafts sanitize soak planted clients docs page check format \
	dev bench train train-drafts train-smoke clean

serve: $(VENV)/.installed
	$(BIN)/minidsa serve $(ARGS)

# A file's tests stay in one process, so servers and checkpoints are made once. Files start in their
# order, not by their number of tests: those that start servers come first and leave no tail.
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: dev
	$(PYTEST) -m "not gpu and not deep" $(ARGS)

test-unit: dev
	$(PYTEST) -m "not gpu and not deep" tests/unit $(ARGS)

# The long versions of the equality grids, and ten times as many of the cases that hypothesis makes
# up: minutes instead of seconds.
test-deep: dev
	$(PYTEST) -m "(deep or hypothesis) and not gpu" --hypothesis-profile thorough $(ARGS)

# Thousands of random settings in which every answer has to be its own, to the last bit.
sweep: dev
	PYTHONPATH=tests $(BIN)/python tests/unit/sweep.py $(ARGS)

# 500 prompts under every feature with every number of drafts of either kind.
drafts: dev
	PYTHONPATH=tests $(BIN)/python tests/system/drafts.py $(ARGS)

# Small cases of the kernels under NVIDIA's compute-sanitizer, which comes with the CUDA toolkit; also
# `make sanitize TOOL=racecheck` and initcheck. Each allocation stands alone, so that what is read or
# written behind its end shows.
TOOL ?= memcheck
SANITIZED := cache_write fp8_products fp8_rows index_select indexer_logits mla_decode sparse_mla \
	topk_kernel
# Of what only a Hopper GPU runs, and small enough.
SANITIZED_HOPPER := few_heads attention_gpu indexer_logits
SMALL := (lists_around and (65 or 129)) or (holes and 32-) or (pages and 7-) or \
	(odd_heads and 65) or (fp8_pages and 1-33) or short_prompts
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) \
	--target-processes application-only --error-exitcode 1 $(BIN)/python -m pytest -q -x
sanitize: dev
	for name in $(SANITIZED); do \
		$(SANITIZE) -m "not gpu and not deep" tests/kernels/test_$$name.py || exit 1; done
	$(SANITIZE) -m gpu -k "$(SMALL)" $(SANITIZED_HOPPER:%=tests/kernels/test_%.py)

# A million random operations on pool, prefix cache and scheduler: `make soak ARGS="--seed 7"`.
soak: dev
	PYTHONPATH=tests $(BIN)/python tests/unit/soak.py $(ARGS)

# Breaks a copy of the sources in twenty ways, and shows that the tests notice each.
planted: dev
	$(PYTEST) -m deep tests/planted $(ARGS)

# Public clients against a served tiny-dsa, each in an environment of its own under build/clients.
clients: dev
	$(BIN)/python tests/clients/run.py $(ARGS)

# Lists in docs/ that are made from the sources: files, settings, metrics.
docs: dev
	$(BIN)/python tests/unit/test_generated_docs.py

# The chat page in headless Chromium (Debian: apt-get install chromium); leaves pictures in /tmp.
page: dev
	$(BIN)/python tests/page/browser.py $(ARGS)

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Tokens per second on the CPU beside transformers, over the committed result, which is of an idle
# machine; `make bench ARGS="--output FILE.json"` leaves that as it is.
bench: dev
	$(BIN)/python -m benchmarks.cpu_serving checkpoints/tiny-dsa \
		--threads 1 --output benchmarks/results/cpu_serving_1_thread.json $(ARGS)

# Makes checkpoints/tiny-dsa anew on a GPU, in two runs of eight minutes: see training/README.md.
train: dev
	$(BIN)/python -m training --out build/tiny-dsa-first --seed 1 --minutes 8.2 --workers 14 --no-gates
	$(BIN)/python -m training --resume build/tiny-dsa-first --out checkpoints/tiny-dsa \
		--phases sparse:1 --lr 1.5e-3 --index-lr 4e-3 --seed 100001 --minutes 7.9 --workers 14 \
		--no-gates
	$(BIN)/python -m benchmarks.tiny_dsa --device cuda --rows 12

# Teaches the MTP layer of checkpoints/tiny-dsa to draft several tokens ahead, on a CPU.
train-drafts: dev
	$(BIN)/python -m training --resume checkpoints/tiny-dsa --out build/tiny-dsa-drafts \
		--phases drafts:1 --lr 1e-3 --index-lr 1e-3 --seed 200001 --device cpu --minutes 20 \
		--batch-tokens 2048 --no-gates
	$(BIN)/python -m training --resume build/tiny-dsa-drafts --out checkpoints/tiny-dsa \
		--phases drafts:1 --lr 4e-4 --index-lr 1e-3 --seed 200002 --device cpu --minutes 14 \
		--batch-tokens 2048 --no-gates
	$(BIN)/python -m benchmarks.tiny_dsa --tasks --output benchmarks/results/tiny_dsa_tasks.json

# Every phase in half a minute on a CPU; the gates cannot be passed, and its exit status says so.
train-smoke: dev
	$(BIN)/python -m training --preset smoke --device cpu --out build/smoke --steps 6 \
		--batch-tokens 1024; test $$? -eq 1

# uv looks at the machine and takes torch's CPU or CUDA build from torch's own index; where it cannot,
# pip decides, and says so itself if it fails as well.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "1/3 making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "2/3 installing torch: several hundred MB, minutes on a slow line"
	$(BIN)/python -m pip install -q -c constraints.txt uv
	@UV_HTTP_RETRIES=0 $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=auto \
		-c constraints.txt torch 2>$(VENV)/uv.log || { \
		echo "    torch's own index is not to be had ($(VENV)/uv.log says why): pip installs it"; \
		$(BIN)/python -m pip install -q -c constraints.txt torch; }
	@echo "3/3 installing minidsa and the other libraries"
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
