"""Ollama as teacher and as target: no torch, nothing of Ansible."""
