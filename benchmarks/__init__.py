"""Benchmarks. `make bench NAME=...` runs one; each module's docstring says what it measures, how, and how long it takes."""
