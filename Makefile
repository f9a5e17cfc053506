# make generate   the model answers: PROMPT="..." MODEL=dir|id|preset:name ARGS="..."
# make test       everything that runs without a GPU
# make test-gpu   the tests that need one
#
# Each sets up .venv first and can be run again: a change of pyproject.toml or constraints.txt
# installs anew. If python3 already has torch and triton, as on GPU machines, .venv sees its
# packages and installs only what they lack.

SHELL := /bin/bash
PYTHON ?= python3
MODEL ?=
PROMPT ?= def __init__(self, name, value=None):
ARGS ?= --max-tokens 64 $(if $(MODEL),,--drafts 2 --seed 1 --repetition-penalty 1.15)
JOBS ?= 2
MAKEFLAGS += --jobs=$(JOBS)  # triton 3.6 is fetched while mypy has the other core

VENV := .venv
PY := $(VENV)/bin/python
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(KEY)
DEV_READY := $(VENV)/.dev-ready-$(KEY)
TRITON36 := .venv-triton36
TRITON36_READY := $(TRITON36)/.ready-3.6.0

OWN := sys.prefix == os.path.abspath('$(VENV)')
BORROW := $(shell $(PYTHON) -c "import os, sys; from importlib.util import find_spec as has; \
	print('yes' if has('torch') and has('triton') and not $(OWN) else '')")
INSTALL := $(PY) -m pip install --quiet $(if $(BORROW),--no-build-isolation,-c constraints.txt)
# Tests use small tensors: more threads than test workers only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS)

.PHONY: generate test lint test-triton36 test-gpu
.DELETE_ON_ERROR:

# the prompt as it was given: neither make nor the shell reads it
generate: export TEXT := $(value PROMPT)
generate: $(READY)
	$(PY) -m nemotriton.generate $(MODEL) --prompt "$$TEXT" $(ARGS)

test: lint $(TRITON36_READY)
	$(PYTEST) tests -m "not gpu"
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter
	$(MAKE) --no-print-directory test-triton36
	$(PY) -m nemotriton.autotune compile --arch sm_90,sm_100 --jobs $(JOBS)

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# GPU machines often have triton 3.6: every kernel, one dtype, on that one too.
test-triton36: $(DEV_READY) $(TRITON36_READY)
	PYTHONPATH=$(TRITON36) $(PY) -c \
	  "import triton; assert triton.__version__ == '3.6.0', triton.__file__"
	PYTHONPATH=$(TRITON36) TRITON_INTERPRET=1 $(PYTEST) tests/interpreter \
	  -k "matches_twin and fp32"

test-gpu: $(READY)
	$(INSTALL) "pytest>=8" "hypothesis>=6.100"
	$(PY) -c "import torch; assert torch.cuda.is_available(), 'torch sees no CUDA device'"
	$(PY) -m pytest -m gpu tests/gpu

# --system-site-packages would miss the packages of a python3 that lives in a virtual environment
# itself: a .pth file names the folders that python3 reads.
$(READY):
	$(PYTHON) -m venv $(VENV)
ifdef BORROW
	$(PY) -m pip uninstall --quiet --yes setuptools  # an old one comes with a 3.11 environment
	$(PYTHON) -c "import sys; print('import site;', *(f'site.addsitedir({p!r});' \
	  for p in sys.path if p.endswith('-packages')))" \
	  > "$$($(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/python3.pth"
	$(INSTALL) "setuptools>=77"
endif
	$(INSTALL) --editable .
	touch $@

$(DEV_READY): $(READY)
	$(INSTALL) --editable ".[dev,json,serve]"
	touch $@

# The interpreter of triton 3.6 does not run on numpy 2.4.
$(TRITON36_READY): $(READY)
	$(PY) -m pip install --quiet --upgrade --target $(TRITON36) "triton==3.6.0" "numpy<2.4"
	touch $@
