"""The part of trainyard that runs on the nodes: a run spec in, a trained adapter out. Knows nothing of Ansible."""

__version__ = "0.1.0"
