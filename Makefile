# make train   set up the environment, then train on this machine as two hosts
# make test    set up the environment, then run the checks and the fast tests
# make circle  teach, train, merge and deploy on this machine (needs Ollama)
# make help    all targets
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready# what a run needs
TESTED := $(VENV)/.ready-tests# and what the tests, the lint and the documentation site need
# Commands find the project's Python environment first on PATH.
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.DEFAULT_GOAL := help
.PHONY: help setup train learn circle test test-all test-rest test-long test-gpu gpu-wheels lint docs docs-site pictures dashboard-picture lock dist clean

include molecule/lab.mk benchmarks/bench.mk

help:
	@echo "make setup                                    create .venv with all that the tests need, as make test does first"
	@echo "make train [ARGS='-e model=... -e lr=1e-3']   train on this machine as two hosts"
	@echo "make learn                                    train a real chat model on this machine, and ask it before and after"
	@echo "make circle [ARGS=--keep]                     teach, train, merge, deploy and evaluate on this machine (needs Ollama)"
	@echo "make test [ARGS='-k checkpoint']              lint, unit tests, fast integration tests, one lab test (minutes)"
	@echo "make test-all                                 every test but the nightly ones (less than an hour)"
	@echo "make test-rest                                what test-all runs and test does not"
	@echo "make test-long                                the nightly tests (hours)"
	@echo "make test-gpu [PYTHON=python3]                check the trainer on one NVIDIA GPU (9 minutes, no network)"
	@echo "make gpu-wheels [GPU_PYTHON=3.12 GPU_CUDA=13.0]  what test-gpu needs besides torch, as one file of 60 MB"
	@echo "make lint                                     ruff, mypy, ansible-lint, generated docs up to date"
	@echo "make docs                                     generate reference pages, READMEs of roles and docs/trainyard.1"
	@echo "make docs-site                                build the documentation site into site/"
	@echo "make pictures                                 draw the pictures of docs/internals/architecture.md (needs Graphviz)"
	@echo "make dashboard-picture                        take the picture of docs/dashboard.md (needs chromium)"
	@echo "make lab [N=3 RELEASE=bookworm,trixie]        start a lab of hosts on this machine (root, Debian or Ubuntu)"
	@echo "make lab-status, lab-down, lab-clean          list the labs, stop the lab, remove all labs and their caches"
	@echo "make bench NAME=speed [ARGS='--rounds 5']     run a benchmark; make bench lists them"
	@echo "make dist                                     build the sdist, the wheel and the Ansible collection: dist/"
	@echo "make lock [ARGS='--upgrade unsloth']          pin what pyproject.toml requires, for every flavour: constraints*.txt"
	@echo "make clean                                    remove the environment and the caches"

setup: $(TESTED)

$(READY): pyproject.toml setup.py constraints.txt
	@tools/need-python $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV), which takes a minute, once"
	@grep '^uv==' constraints.txt > $(VENV)/uv.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(VENV)/uv.txt
	@PYTHONPATH=. $(BIN)/python tools/install.py dashboard,node
	@touch $@

$(TESTED): $(READY)
	@echo "adding what the tests need to $(VENV), once"
	@PYTHONPATH=. $(BIN)/python tools/install.py dashboard,node,dev
	@touch $@

train: $(READY)
	@$(RUN) ansible-playbook train.yml -e model=tiny $(ARGS)

learn: $(READY)
	@$(RUN) trainyard train --model smollm2 --run learn $(ARGS)
	@$(RUN) trainyard evaluate base learn --questions observatory,general

circle: $(READY)
	@$(RUN) PYTHONPATH=. python tools/circle.py $(ARGS)

test: $(TESTED)
	@$(RUN) tools/run-tests fast $(ARGS)

test-all: $(TESTED)
	@$(RUN) tools/run-tests all $(ARGS)

test-rest: $(TESTED)
	@$(RUN) tools/run-tests rest $(ARGS)

test-long: $(TESTED)
	@$(RUN) tools/run-tests long $(ARGS)

# It needs no environment of the project: PYTHON is one with torch for CUDA.
test-gpu:
	@tools/gpu-test $(PYTHON) $(ARGS)

GPU_PYTHON ?= 3.12
GPU_CUDA ?= 13.0
gpu-wheels: $(TESTED)
	@$(RUN) python -m benchmarks.gpu.wheels --python $(GPU_PYTHON) --cuda $(GPU_CUDA) $(ARGS)

lint: $(TESTED)
	@$(RUN) tools/lint

docs: $(TESTED)
	@$(RUN) python tools/write_docs.py

docs-site: $(TESTED)
	@$(BIN)/python -m mkdocs build --strict --site-dir site
	@echo "to read and search it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

pictures:
	@tools/draw-pictures

dashboard-picture: $(TESTED)
	@$(RUN) PYTHONPATH=.:tests/support python tools/draw_dashboard.py docs/dashboard.png

lock: $(TESTED)
	@$(RUN) PYTHONPATH=. python tools/lock.py $(ARGS)

dist: $(READY)
	@$(BIN)/uv build -q --out-dir dist
	@PYTHONPATH=. $(BIN)/python tools/collection.py dist

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache site
