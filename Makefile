# make quickstart | test | test-unit | lint | gpu-check.   PYTHON=python3.11 picks the interpreter, SEED=1 another seed of the quickstart.
SEED ?= 0
QUICKSTART_DIR ?= runs/quickstart-seed$(SEED)
BIN := .venv/bin

.PHONY: install quickstart task test test-unit gpu-check lint clean

install:
	@tools/install_cpu.sh

quickstart: install
	@QUICKSTART_DIR=$(QUICKSTART_DIR) $(BIN)/python examples/quickstart/run.py --seed $(SEED)

task: install
	@$(BIN)/python examples/quickstart/make_task.py --out runs/quickstart/task --seed $(SEED)

test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

test-unit: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit

gpu-check:
	@tools/gpu_check.sh

lint: install
	@$(BIN)/ruff check . && $(BIN)/lint-imports

clean:
	rm -rf .venv runs
