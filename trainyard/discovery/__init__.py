"""Finds the Ollama servers of a local network and tells which machines they are.

Pure Python, nothing of Ansible. Read in this order: `settings` (what a person may say), `networks` (where to look),
`scan` (who has the port open), `http` and `replies` (is it really Ollama), `ssh` (host keys), `identity` (which answers
are one machine), `engine` (all of it, in order), `report` (what came out, and the words for it). `settle` judges again
after login, with facts instead of hints.
"""
