# Included by the Makefile: strategies that spare the network, beside DDP. Needs root (network namespaces, tc).
.PHONY: bench-replicas
bench-replicas: $(VENV)/.ready
	@PYTHONPATH=. $(VENV)/bin/python benchmarks/replicas.py $(ARGS)
