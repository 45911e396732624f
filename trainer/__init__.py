"""The package that runs on the nodes: it trains an adapter or a model from a run spec. It imports nothing of Ansible."""

__version__ = "0.2.0"
