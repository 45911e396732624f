.PHONY: bench-site

bench-site: $(READY)
	@$(VENV)/bin/python benchmarks/site.py $(ARGS)
