# make lab    JupyterLab with two RDMA hosts behind it     (all set-up included)
# make test   every test                                   (all set-up included)
#
# Both work on a fresh Debian or Ubuntu with nothing but git, make and python3, as root or as a
# user with sudo. What is there already is not made again.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST_ARGS ?=
LAB_ARGS ?=

# The environment is made anew for another Python or another folder (its scripts name both), and
# filled anew when pyproject.toml says something else. Content counts here, not the clock.
BASE   := $(shell { $(PYTHON) -V; pwd; } 2>&1 | cksum | cut -d ' ' -f 1)
FILLED := $(shell cksum < pyproject.toml | cut -d ' ' -f 1)
STAMP  := $(VENV)/.filled-$(BASE)-$(FILLED)

# Quick tests first, so that a typing mistake shows before the hosts boot; then those that take
# longest, so that no process is left with one of them while the other has nothing to do.
TESTS  := $(wildcard tests/test_house.py tests/unit tests/labs tests/grading tests/browser tests/docker tests/fabric)

# Two processes share the files of tests out, each with hosts of its own: a test mostly waits.
WORKERS ?= 2

# Repetitions at many moments and foreign test suites are marked `long`. CI runs them too.
SELECT := $(if $(RDMALAB_REQUIRE_ALL),,-m 'not long')

.PHONY: help setup system image lab test test-backends bench labs lint clean
.DELETE_ON_ERROR:

help:
	@echo 'make lab     JupyterLab with two RDMA hosts (sets everything up first)'
	@echo 'make test    the tests (sets everything up first); RDMALAB_REQUIRE_ALL=1: the long ones too'
	@echo 'make test-backends   docker and local hosts, in an emulated machine with rxe and Docker'
	@echo 'make setup   only the set-up: system packages, $(VENV), guest image'
	@echo 'make bench   the performance promises, measured'
	@echo 'make labs    build labs/*.ipynb from labs/source/*.py'
	@echo 'make lint    ruff and mypy'
	@echo 'make clean   stop all hosts, remove $(VENV) and what tools left here'

setup: image

system:
	@$(PYTHON) -m rdmalab.doctor --fix --system $(DOCTOR_ARGS)

$(STAMP): | system
	@echo 'rdmalab: installing Python packages into $(VENV) (about 600 MB, a minute or two) ...'
	@{ test -e $(VENV)/.made-$(BASE) \
	     || { $(PYTHON) -m venv --clear $(VENV) && touch $(VENV)/.made-$(BASE); }; } \
	  && rm -f $(VENV)/.filled-* \
	  && $(BIN)/python -m pip install --quiet --progress-bar off --editable '.[test]' \
	  && touch $@ \
	  || { echo 'rdmalab: The Python packages could not be installed into $(VENV); what pip says above' \
	       'tells why (often the network or the disk): mend it and run make again.' >&2; exit 1; }

image: $(STAMP)
	@$(BIN)/rdmalab image build

lab: setup
	@$(BIN)/rdmalab lab $(LAB_ARGS)

test: DOCTOR_ARGS = --test
test: setup
	@$(BIN)/python -m pytest $(TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SELECT) $(PYTEST_ARGS)

# A machine of its own, emulated, so nothing is shared out; what runs in it is shown as it goes.
test-backends: setup
	@$(BIN)/python -m pytest tests/backends --capture=no $(PYTEST_ARGS)

bench: setup
	@$(BIN)/python bench/promises.py

labs: $(STAMP)
	@$(BIN)/python labs/build.py

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file .ci/mypy-hostside.ini rdmalab/hostside/*.py

clean:
	@test ! -x $(BIN)/rdmalab || $(BIN)/rdmalab down --all \
	  || echo 'rdmalab: hosts could not be stopped, in case any were running.' >&2
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo 'rdmalab: clean. The guest image stays in your cache folder (rdmalab image info shows it).'
