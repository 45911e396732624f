.PHONY: bench-start bench-faults

bench-start: $(READY)
	@$(VENV)/bin/python tests/bench/start.py $(ARGS)

bench-faults: $(READY)
	@$(VENV)/bin/python tests/bench/faults.py $(ARGS)
