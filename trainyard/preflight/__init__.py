"""Checks before a run: the state of each host, the network between hosts, and a report with a remedy for each finding.

Read in this order: `host_state` (the answers of a host), `gather` and `mesh` (the requests), `host_checks` and
`cluster_checks` (from answers to findings, no I/O), `report` (table, JSON and exit code), `runner` (all steps in order).
"""
