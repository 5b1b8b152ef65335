# make setup, quickstart, eval, test, test-all, lint: each sets up .venv first, if it is not there yet.
# make gpu runs in your own environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Dead workers are not restarted, because pytest-xdist 3.8 may then wait for ever (its issue 1378)
PYTEST := $(BIN)/python -m pytest -n auto --max-worker-restart=0 --dist loadfile
# A test that hangs is named and failed after 100 s (pyproject.toml), and after 110 s if it hangs in C++, where no signal
# is handled: its worker prints where, and ends
FAST := $(PYTEST) -o faulthandler_timeout=110 -o faulthandler_exit_on_timeout=true
unexport PYTHONDONTWRITEBYTECODE  # processes that tests start would compile every module anew

# PyTorch comes first, so that pip takes the build it would take without hashes: one for CPUs if an index has it
# (CONTRIBUTING.md). It comes again at the end for what a build for CUDA needs beside it.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH = $$(grep -o '^torch==[0-9.]*' requirements.lock)

.PHONY: setup quickstart eval test test-all other-programs test-slow test-avx2 lowering lint gpu

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps $(TORCH)
	$(PIP) --no-deps --require-hashes -r requirements.lock
	$(PIP) $(TORCH)
	touch $@

# Two minutes in all: on a quiet machine, all but the training takes ten seconds. An interrupted run continues. A finished
# run is only evaluated, drawn and sampled again.
quickstart: setup
	@grep -qs sha256 data/python_stdlib/meta.json || $(BIN)/python data/python_stdlib/prepare.py
	@$(BIN)/python train.py config/quickstart.py --minutes=1.8 --init_from=auto
	@$(BIN)/python plot.py out-quickstart
	@$(BIN)/python sample.py out-quickstart --num_samples=1 --max_new_tokens=600 --start='def '

# make eval RUN=out TASKS=hellaswag,lambada_openai scores a run with lm-evaluation-harness, into RUN/lm_eval_DATE.json.
# If no id ends a text in its data, FIRST is the id that lm_eval puts before each: 10 is a new line in bytes
RUN ?= out-quickstart
TASKS ?= sonnets
FIRST ?= $(if $(filter out-quickstart,$(RUN)),10)
eval: setup
	@rm -rf $(RUN)/hf && $(BIN)/python export.py $(RUN) $(RUN)/hf
	@$(BIN)/python -m lm_eval run --model hf --model_args pretrained=$(RUN)/hf,dtype=float32$(FIRST:%=,prefix_token_id=%) \
		--include_path eval --tasks $(TASKS) --output_path $(RUN)/lm_eval.json

# Every promise once: what a change must not break. One pytest worker per core; for one process, run python -m pytest
test: setup
	$(FAST)

# All there is, one after another; the GitHub workflow runs these side by side
test-all: test-slow test-avx2 lowering

# Programs that open our exports, in a folder of their own: tests/test_transformers_4.py
OTHERS := $(abspath $(VENV))/others
other-programs: $(OTHERS)/.installed

$(OTHERS)/.installed: $(VENV)/.installed
	$(PIP) --no-deps --upgrade --target $(OTHERS)/transformers_4 transformers==4.57.1 tokenizers==0.22.1 huggingface_hub==0.36.2
	touch $@

# The tests of make test, and those marked slow: kills, full disks, mutants, the commands of the docs.
# FAULTS_SEED=7 draws other random numbers
test-slow: export TRANSFORMERS_4 := $(OTHERS)/transformers_4
test-slow: setup other-programs
	$(PYTEST) --timeout=300 -m '' --ignore=tests/lowering

# What computes, as on a CPU with only AVX2, which adds up in another order and has no instructions for bfloat16. On such
# a CPU, make test covers this
COMPUTES := $(addprefix tests/fusedgpt/,attention generation interchange machine parallel training test_loss.py test_rotary.py)
COMPUTES += $(addprefix tests/test_,compiled.py model.py resume.py sample.py step.py train.py within_documents.py)
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: setup
	@if env -u ATEN_CPU_CAPABILITY $(BIN)/python -c 'import sys, torch; sys.exit(torch.backends.cpu.get_cpu_capability() != "AVX2")'; \
	then echo 'make test covers it: this CPU has only AVX2'; \
	else $(FAST) $(wildcard $(COMPUTES)); fi

# what Inductor makes of a step for an H200, without one: docs/benchmarks.md. Triton (700 MB) has a folder of its own,
# because PyTorch's build for CPUs does not need it
TRITON := $(VENV)/triton
lowering: setup
	@test -d $(TRITON)/triton || $(PIP) --no-deps --target $(TRITON) triton==3.7.0 || { echo 'Triton cannot be installed here: the tests skip, except in CI'; test -z "$$CI"; }
	PYTHONPATH=$(TRITON) $(PYTEST) --dist load -rs -m slow tests/lowering

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Measure everything on a GPU, into results/<device>. Run again, it measures what is missing. It does not use .venv,
# whose PyTorch may be a CPU build. Example: make gpu PYTHON=python ARGS=--max_seconds=550
gpu:
	@$(PYTHON) -c 'import importlib.util, sys; absent = [n for n in sys.argv[1:] if not importlib.util.find_spec(n)]; sys.exit("error: not installed: " + ", ".join(absent) + ". Run: $(PYTHON) -m pip install " + " ".join(absent) if absent else 0)' torch numpy tyro docstring_parser typeguard tqdm pytest matplotlib transformers
	@$(PYTHON) bench.py gpu $(ARGS)
