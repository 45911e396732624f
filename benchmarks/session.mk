.PHONY: bench-start bench-faults

bench-start: $(READY)
	@$(VENV)/bin/python benchmarks/start.py $(ARGS)

bench-faults: $(READY)
	@$(VENV)/bin/python benchmarks/faults.py $(ARGS)
