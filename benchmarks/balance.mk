# Included by the Makefile: unlike hosts in the lab. Needs root.
.PHONY: bench-balance
bench-balance: $(VENV)/.ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" python benchmarks/balance.py $(ARGS)
