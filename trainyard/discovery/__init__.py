"""Find the Ollama servers of a local network, and group their answers by address. Nothing here imports Ansible.

Read in this order: `settings` (the options), `networks` (which addresses to scan), `scan` (which ports are open, and whether
Ollama answers), `ollama_replies`, `ssh` (host keys), `engine` (the complete scan), `scan_result` (its machines and messages),
`trust` (whether a machine may be used). `duplicates` finds the entries that are one machine after login.
"""
