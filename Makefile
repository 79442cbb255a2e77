# make demo   train a small LLaMA, one sequence split over all ranks: on up to 4 GPUs, or on 4 CPU ranks
# make test   the tests, with a pairwise cover of every case grid; those for GPUs after them, where there is one
# make gpu    a first hour on the GPUs of one node: tests and measurements, and one file of both in runs/gpu; or MINUTES=15
# make test-gpu   the tests for GPUs alone
# make test-all   the tests, with every case grid whole (of many ranks a cover), the Trainer's with the oldest transformers too, Liger's and QLoRA's
# make test-next   the tests with the newest releases that pip finds, which setup.cfg may not allow yet
# make docs   the site, in build/site; a dead link fails
# Each makes .venv first, where there is none or the requirements changed.

PYTHON ?= python3
# where these two are not given, the demo chooses them by what the machine has
RANKS ?=
CONFIG ?=
OUT ?= runs/demo
MINUTES ?=
VENV := .venv
# what setup.cfg allows; constraints.txt has the newest
OLDEST := transformers==5.18.0
# Liger's kernels, here in Triton's interpreter; weights of four bits
LIGER := liger-kernel==0.8.5 bitsandbytes==0.50.2
# whose newest releases `test-next` takes
NEXT := torch transformers deepspeed accelerate peft trl
# one more than cores here, because ranks wait for one another and for time to pass; each worker imports everything, and
# starts a server that ranks are forked from
WORKERS ?= 3
# an idle worker takes over tests that another has not begun: tests that start a launch are long
PYTEST := python -m pytest --numprocesses $(WORKERS) --dist worksteal
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# what pip does on one core, without what is seldom imported; some files of some packages are templates, and no Python
SELDOM := /(tests?|pip|mypy|fontTools)/|/transformers/models/(?!llama/|auto/|__init__)
BYTECODE := $(VENV)/bin/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true

# tests see no GPU without this variable: see tests/conftest.py
ON_GPU := GPU_TESTS=1 python -m pytest -rs -m gpu tests/gpu
HAS_GPU := python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"

# without the builder's advertisement
SITE := NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet

.PHONY: demo test test-all gpu test-gpu test-next lint format docs

demo: $(VENV)/.ready
	python examples/demo.py $(if $(RANKS),--ranks $(RANKS)) $(if $(CONFIG),--config $(CONFIG)) --out $(OUT)

test: $(VENV)/.ready
	$(PYTEST) -m "not slow and not gpu" tests
	if $(HAS_GPU); then $(ON_GPU); fi

gpu: $(VENV)/.ready
	python -m benchmarks.gpu.first_hour $(if $(MINUTES),--minutes $(MINUTES))

test-gpu: $(VENV)/.ready
	$(ON_GPU)

test-all: $(VENV)/oldest/.ready $(VENV)/liger/.ready
	$(PYTEST) -m "not gpu" tests
	if $(HAS_GPU); then $(ON_GPU); fi
	PYTHONPATH=$(CURDIR)/$(VENV)/oldest $(PYTEST) -m "not slow and not gpu" tests/hf/test_trainer_*.py
	PYTHONPATH=$(CURDIR)/$(VENV)/liger python -m pytest tests/hf/test_liger.py tests/hf/test_quantized.py

# an environment of its own, upgraded each time; pip says that setup.cfg does not allow it
test-next: export PATH := $(CURDIR)/$(VENV)/next/bin:$(PATH)
test-next:
	$(PYTHON) -m venv $(VENV)/next
	python -m pip install --quiet --editable ".[dev]"
	python -m pip install --quiet --upgrade $(NEXT)
	python -m pip list --format=freeze | grep -E "^($(subst $() ,|,$(NEXT)))=="
	$(PYTEST) -rfE -m "not slow and not gpu" tests

lint: $(VENV)/.ready
	ruff check . && ruff format --check . && mypy
	$(SITE)

docs: $(VENV)/.ready
	$(SITE)

format: $(VENV)/.ready
	ruff format . && ruff check --fix .

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('ds_seqpar needs Python 3.11 or later; got ' + \
		sys.version.split()[0] + ', say make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	$(BYTECODE)
	touch $@

# laid over the environment, which has all that they need
$(VENV)/oldest/.ready: REQUIRED := $(OLDEST)
$(VENV)/liger/.ready: REQUIRED := $(LIGER)
$(VENV)/oldest/.ready $(VENV)/liger/.ready: $(VENV)/.ready
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) $(REQUIRED)
	touch $@
