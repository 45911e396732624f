# Included by the Makefile: make bench NAME=speed [ARGS='--rounds 5'] runs the module benchmarks/NAME.py.
BENCHMARKS := agree speed traffic plan start site pool rollouts deploy_time
NAME ?=
# TRL has an environment of its own, because it installs many packages.
TRL := .venv.bench
BENCH_NEEDS_speed := $(TRL)/.ready
BENCH_ARGS_speed := --trl $(TRL)/bin/python
BENCH_NEEDS_agree := $(TRL)/.ready
BENCH_ARGS_agree := --trl $(TRL)/bin/python

.PHONY: bench
ifeq ($(filter $(NAME),$(BENCHMARKS)),)
bench:
	@echo "usage: make bench NAME=NAME [ARGS='...'] with one of these names; ARGS=--help describes a benchmark's options"
	@for name in $(BENCHMARKS); do printf '  %-12s %s\n' $$name "$$(sed -n '1s/^"""//p' benchmarks/$$name.py)"; done
	@test -z "$(NAME)" || { echo "error: unknown benchmark '$(NAME)'" >&2; exit 2; }
else
bench: $(TESTED) $(BENCH_NEEDS_$(NAME))
	@$(RUN) HF_HUB_OFFLINE=1 PYTHONPATH="$(CURDIR):$(CURDIR)/tests/support:$(CURDIR)/molecule/resources" \
	  python -m benchmarks.$(NAME) $(BENCH_ARGS_$(NAME)) $(ARGS)
endif

$(TRL)/.ready: pyproject.toml constraints.txt | $(TESTED)
	@test -x $(TRL)/bin/python || $(VENV)/bin/python -m venv $(TRL)
	@$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(TRL)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/trainyard.pth"
	@grep '^trl==' constraints.txt > $(TRL)/trl.txt
	@$(TRL)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes --requirement $(TRL)/trl.txt
	@touch $@
