# make demo     a real Megatron GPT loses a rank twice and ends with the weights of an undisturbed run
# make test     all tests, six at a time          make test TEST_ARGS="-k board" TEST_JOBS=0
# make lint     ruff and mypy
# make bench    what it costs and saves, beside torchrun and nvidia-resiliency-ext     BENCH_ARGS="--only hooks"
# make verdicts does the launcher name the rank that hung or died, and where     VERDICTS_ARGS="--runs 5"
# make chaos    hundreds of faults at odd moments of a real job     CHAOS_ARGS="--runs 20"
# make gpu      what only a GPU shows, on one GPU in 8 minutes
# make simulate thousands of simulated jobs, each from a seed     SIMULATE_ARGS="--runs 100000", "--only 1234"
# make mutate   bugs planted in what decides: which no test finds     MUTATE_ARGS="--only places", "--known before.txt"
# make fuzz     hostile input to every socket, board and file     FUZZ_ARGS="--seed 7 --messages 1000000"
# make megatron an unmodified checkout of Megatron-LM on the CPU, with faults     MEGATRON_ARGS="CHECKOUT ..."
# make slurm    jobs on a real Slurm in namespaces of this machine, and what clusters do to them     SLURM_ARGS="--only scancel"
# make programs other people's programs beside torchrun, each loses a rank     PROGRAMS_ARGS="--python PYTHON --sources DIR"
# make docs     the site of docs/ into build/site, strictly: a broken link fails
# make clean    remove what the targets above made, .venv included
#
# Each target first installs what it needs into .venv; a second call finds it there. PYTHON=python3.12 picks another
# interpreter, TORCH="torch==2.13.0 --index-url ..." another build of torch.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
# Most tests wait for processes more than they compute; five of them run at a time (tests/conftest.py), beside those of
# which that is all. Those of one file stay together, for what they share. The order is that of the folders: the long
# ones of tests/e2e first, so that none is left alone at the end.
TEST_JOBS ?= 6
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := .venv/.installed
BENCH_INSTALLED := .venv/.bench-installed
DOCS_INSTALLED := .venv/.docs-installed
CODE := megatron_ft tests examples

.PHONY: help demo test lint bench gpu verdicts chaos simulate mutate fuzz megatron programs slurm docs clean

help:
	@sed -n 's/^# \(make [a-z]*\)/\1/p' Makefile

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

# Tests start hundreds of processes: with PYTHONDONTWRITEBYTECODE set, each would compile the sources anew.
test: $(INSTALLED)
	@$(BIN)/python -m compileall -q $(CODE)
	@$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --quiet --check $(CODE) || { echo "make lint: run $(BIN)/ruff format" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

bench: $(BENCH_INSTALLED)
	@$(BIN)/python tests/bench/run.py $(BENCH_ARGS)

verdicts: $(INSTALLED)
	@$(BIN)/python tests/verdicts/campaign.py $(VERDICTS_ARGS)

chaos: $(INSTALLED)
	@$(BIN)/python tests/chaos/run.py $(CHAOS_ARGS)

gpu: $(INSTALLED)
	@$(BIN)/python tests/gpu.py

simulate: $(INSTALLED)
	@$(BIN)/python tests/simulation/run.py $(SIMULATE_ARGS)

mutate: $(INSTALLED)
	@nice $(BIN)/python tests/mutation/run.py $(MUTATE_ARGS)

fuzz: $(INSTALLED)
	@$(BIN)/python tests/fuzz/run.py $(FUZZ_ARGS)
	@$(BIN)/python -m pytest --timeout 0 --hypothesis-profile=fuzz tests/unit/campaigns/test_fuzz_texts.py

megatron: $(INSTALLED)
	@$(BIN)/python tests/megatron/campaign.py $(MEGATRON_ARGS)

programs: $(INSTALLED)
	@$(BIN)/python tests/programs/campaign.py $(PROGRAMS_ARGS)

slurm: $(INSTALLED)
	@$(BIN)/python tests/slurm/campaign.py $(SLURM_ARGS)

docs: $(DOCS_INSTALLED)
	@$(BIN)/mkdocs build --quiet --strict

clean:
	@rm -rf .venv build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without a GPU the CPU build of torch does, and is ten times smaller: an index or a folder that pip already knows may
# have it. Where none has, it is the plain one; TORCH= above names an index of your own.
TORCH ?=
$(INSTALLED): pyproject.toml constraints.txt
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=missing; \
	case $$version in \
	    3.[0-9]|2.*|missing) \
	        echo "make: $(PYTHON) is $$version, and 3.10 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1;; \
	esac
	@echo "make: installing into .venv (once)" >&2
	@$(PYTHON) -m venv .venv
	@if [[ -n "$(TORCH)" ]]; then $(PIP) $(TORCH); \
	elif nvidia-smi --list-gpus >/dev/null 2>&1; then $(PIP) torch; \
	else torch=$$(sed -n 's/^torch==//p' constraints.txt); \
	    $(PIP) "torch==$$torch+cpu" >/dev/null 2>&1 \
	    || $(PIP) torch; \
	fi
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation --editable ".[megatron,report,test]"
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@$(PIP) "mkdocs-material>=9.5"
	@touch $@

# The reference and what it imports go into a folder of their own: its script is called ft_launcher like ours, and
# nothing of it may load into our processes. Where it can't be installed, the comparison with it is left out.
$(BENCH_INSTALLED): $(INSTALLED)
	@$(PIP) --no-deps --upgrade --target .venv/nvrx \
	    nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml \
	    || echo "make: nvidia-resiliency-ext==0.4.1 can't be installed here: measuring without it" >&2
	@touch $@
