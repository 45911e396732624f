"""Ollama as teacher and as target. Imports neither torch nor Ansible."""
