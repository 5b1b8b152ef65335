# make quickstart, make eval, make test, make test-avx2, make faults, make lint: each sets up what it needs in .venv and is quick when run again;
# make gpu runs in your own environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a test that hangs, or that takes its process down, fails by its name (the slowest takes three minutes on two quiet
# cores; a process that is replaced would leave pytest-xdist 3.8 waiting for ever: its issue 1378)
PYTEST := $(BIN)/python -m pytest --timeout=600 --max-worker-restart=0 --dist loadfile

.PHONY: setup quickstart eval test test-avx2 faults lint gpu

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

# an interrupted run continues; a finished one is only evaluated, sampled and drawn again
quickstart: setup
	@grep -qs sha256 data/python_stdlib/meta.json || $(BIN)/python data/python_stdlib/prepare.py
	@$(BIN)/python train.py config/quickstart.py --init_from=auto
	@$(BIN)/python plot.py out-quickstart
	@$(BIN)/python sample.py --out_dir=out-quickstart --num_samples=1 --max_new_tokens=600 --start='def '

# make eval RUN=out TASKS='hellaswag lambada_openai': a run's scores by lm-evaluation-harness, into RUN/lm_eval.json
RUN ?= out-quickstart
TASKS ?= sonnets
eval: setup
	@$(BIN)/python export.py $(RUN) $(RUN)/hf
	@$(BIN)/python harness.py $(RUN)/hf $(RUN)/lm_eval.json $(TASKS)

# a process of tests for each core; python -m pytest runs them in one
test: setup
	$(PYTEST) -n auto

# as on a CPU with AVX2 only, which adds up in another order and has no instructions for bfloat16: each file that imports
# torch, so a new one too, but for those that measure time and memory or end processes. On such a CPU, make test is all
# of it
SAME_ON_AVX2 := test_(campaign|distributed|fits|max_batch|memory|sample|scale|shard_files|signals|sweep)[.]py
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: setup
	@if env -u ATEN_CPU_CAPABILITY $(BIN)/python -c 'import sys, torch; sys.exit(torch.backends.cpu.get_cpu_capability() != "AVX2")'; \
	then echo 'make test has tested it: this CPU has AVX2 only'; \
	else $(PYTEST) -n auto $$(grep -rlE '^(import|from) torch' tests --include='test_*.py' | grep -vE '$(SAME_ON_AVX2)'); fi

# kills, corruptions, full disks, dying workers, fuzzing; FAULTS_SEED=7 make faults takes other random numbers
faults: setup
	$(PYTEST) -m faults -rs -n 2 tests/faults

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# all that there is to measure on a GPU, into results/<device>; the same command goes on with what is missing. Not in
# .venv, whose PyTorch may be a CPU build: make gpu PYTHON=python ARGS=--max_seconds=550
gpu:
	@$(PYTHON) -c 'import importlib.util, sys; absent = [n for n in sys.argv[1:] if not importlib.util.find_spec(n)]; sys.exit("error: not installed: " + ", ".join(absent) + ". Run: $(PYTHON) -m pip install " + " ".join(absent) if absent else 0)' torch numpy tyro tqdm pytest matplotlib transformers
	@$(PYTHON) bench.py gpu $(ARGS)
