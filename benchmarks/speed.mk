# Included by the Makefile: the trainer beside TRL, and what goes over the wire. TRL has an environment of its own, on top of ours.
BENCH := .venv.bench

.PHONY: bench bench-wire bench-plan bench-memory
bench: $(VENV)/.ready $(BENCH)/.ready
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python benchmarks/speed.py --trl $(BENCH)/bin/python $(ARGS)

bench-wire: $(VENV)/.ready
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python benchmarks/wire.py $(ARGS)

bench-plan: $(VENV)/.ready
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python benchmarks/plan.py $(ARGS)

bench-memory: $(VENV)/.ready
	@PYTHONPATH=$(CURDIR) $(VENV)/bin/python benchmarks/memory.py $(ARGS)

$(BENCH)/.ready: pyproject.toml constraints.txt
	@test -x $(BENCH)/bin/python || $(VENV)/bin/python -m venv $(BENCH)
	@$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(BENCH)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ours.pth"
	@$(BENCH)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt trl
	@touch $@
