# make train   set up what is needed, then train on this machine as two hosts
# make test    set up what is needed, then run every test and every check
# make help    the rest
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# pip takes torch's CPU build where one is offered; the pins keep any other package from replacing it.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.DEFAULT_GOAL := help
.PHONY: help setup train test check lint docs lock clean

include $(wildcard molecule/lab.mk benchmarks/*.mk)

help:
	@echo "make train [ARGS='-e model=... -e lr=1e-3']   a run on this machine as two hosts"
	@echo "make test [ARGS='-k checkpoint']              every test and check that this machine can run"
	@echo "make lint                                     ruff, mypy, ansible-lint, and that the docs are true"
	@echo "make lab [N=3] / make lab-down                real hosts on this machine (root, Debian or Ubuntu)"
	@echo "make docs                                     write what is read off the code: docs/run-spec.md, roles' tables"
	@echo "make bench [ARGS='--rounds 5']                 the trainer beside TRL (docs/benchmarks.md)"
	@echo "sudo make bench-wire                          bytes and speed over shaped links between two hosts here"
	@echo "sudo make bench-plan                          what the plan says beside what is then measured, strategy by strategy"
	@echo "make bench-memory                             the plan's memory beside whole runs, every strategy"
	@echo "make bench-discovery                          discovery beside other tools"
	@echo "make bench-replicas                           diloco and averaging beside DDP: bytes, speed, loss (root)"
	@echo "make bench-site                               site.yml again, beside as many tasks that do nothing (root)"
	@echo "make bench-start / bench-faults                how soon a run starts; what 30 random faults do to one (root)"
	@echo "make bench-balance                            rows shared by speed beside equal shares, one host at half speed (root)"
	@echo "make lock                                     take the newest versions and pin them"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@tools/need-python $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): torch first, then the rest (minutes, once)"
	@$(PIP) torch
	@$(PIP) --no-build-isolation setuptools wheel
	@$(PIP) --no-build-isolation --editable '.[controller,node,dev]'
	@touch $@

train: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" ansible-playbook train.yml -e model=tiny $(ARGS)

test: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/run-all $(ARGS)

lint: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/lint

docs: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" python tools/write_docs.py

lock:
	@tools/lock $(PYTHON)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
