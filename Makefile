# Two commands from a fresh clone: `make train` and `make test`. Each makes .venv once, from requirements.txt.
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 2
TRAIN_ARGS ?=

.PHONY: train test test-gpu lint bench clean

train: .venv/.installed
	$(BIN)/python experiments/train.py --ranks $(RANKS) --mini-batch-size 256 $(TRAIN_ARGS)

# Files go to workers whole, since tests of one file share what is dear to make. Three workers, on two cores too, because
# tests of many processes wait for each other; the worlds of one worker take up to 3 GiB. Bytecode is written, whatever the
# environment says: else each of the processes compiles all modules anew.
test: .venv/.installed
	CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: .venv/.installed
	$(BIN)/python -m pytest -m gpu

lint: .venv/.installed
	$(BIN)/ruff check . && $(BIN)/mypy

bench: .venv/.installed
	$(BIN)/python experiments/bench/engine.py --models 0.8m --batches 1 8 --dtype float32 --peers hf

.venv/.installed: requirements.txt setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
