"""Find the Ollama servers of a local network, and group their answers by machine. Nothing here imports Ansible.

Read in this order: `settings` (the options), `networks` (which addresses to scan), `scan` (which ports are open), `http`
and `replies` (whether Ollama answers), `ssh` (host keys), `identity` (which answers come from one machine), `engine` (the
complete scan), `report` (its result and messages), `trust` (whether a machine may be used). `duplicates` compares
machines again after login, with facts instead of hints.
"""
