.PHONY: bench-site

bench-site: $(READY)
	@$(VENV)/bin/python tests/bench/site.py $(ARGS)
