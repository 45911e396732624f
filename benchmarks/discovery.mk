# Included by the Makefile: discovery beside SOLLOL and nmap. SOLLOL has an environment of its own, as it brings 80 packages.
SOLLOL := .venv.sollol

.PHONY: bench-discovery
bench-discovery: $(VENV)/.ready $(SOLLOL)/.ready
	@$(VENV)/bin/python benchmarks/discovery.py --sollol $(SOLLOL)/bin/python

$(SOLLOL)/.ready:
	@test -x $(SOLLOL)/bin/python || $(VENV)/bin/python -m venv $(SOLLOL)
	@$(SOLLOL)/bin/python -m pip install --disable-pip-version-check --quiet sollol==0.9.66
	@touch $@
