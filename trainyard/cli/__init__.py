"""The command-line program `trainyard`: a thin front of the classes behind the playbooks. See docs/command-line.md."""
