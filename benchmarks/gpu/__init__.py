"""Checks of the trainer on one NVIDIA GPU. `make test-gpu` runs them; `cases` and `checks` say what they run and compare.

The modules need only the standard library until `prepare` starts the trainer, so that the driver can report what is missing.
On a machine without a GPU, ``--device cpu`` runs the same checks with models of a few thousand weights on gloo: this tests the
checks, and its figures of speed and memory mean nothing.
"""
