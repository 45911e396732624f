"""Checks of hosts before a run: what each host is, what lies between hosts, and a report with a remedy for each finding.

Read in this order: `host_state` (what a host answered), `gather` and `mesh` (the questions), `host_checks` and
`cluster_checks` (answers to findings, no I/O), `report` (findings to table, JSON and exit code), `runner` (all of it).
"""
