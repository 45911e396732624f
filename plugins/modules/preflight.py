"""Documentation of the action plugin of this name, which runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Check all hosts of a cluster before a run
description:
  - Collects facts and health of all hosts at once. Lets every host listen on the rendezvous port and on random high ports,
    and connect to every other host. Runs an all-reduce over all hosts. Reports each problem with its remedy.
  - Fails if a run would fail. A problem that only makes a run slower is a warning. Changes nothing on the hosts, apart from
    a temporary file in each data directory, which shows whether hosts share it.
options:
  run:
    description: Name of a run whose trainer must be the same on all hosts.
    type: str
    default: ""
  master_port:
    description: Rendezvous port. By default 29500.
    type: int
  quick:
    description: Skip the all-reduce. The speed of links is then measured with plain sockets only.
    type: bool
    default: false
  json:
    description: File on the controller for the report, or C(true) to print the report instead of the table.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Does not check whether hosts share a data directory, because this check creates a temporary file on every host.
author: trainyard
"""

EXAMPLES = r"""
- name: Check all hosts
  preflight:
    json: report.json
  run_once: true
"""

RETURN = r"""
exit:
  description: 0 without findings, 1 for warnings, 2 for failures.
  returned: always
  type: int
findings:
  description:
    - C(check), C(host) (empty for the whole cluster), C(level) (failure, warning or note), C(text) and C(remedy) of each
      problem, the most severe first.
  returned: always
  type: list
  elements: dict
hosts:
  description: Address, C(facts), C(health) and C(mesh) of every host, or its C(error).
  returned: always
  type: dict
all_reduce:
  description: C(mbit), C(latency_ms) and C(torch) of the all-reduce over all hosts; null if it was not run.
  returned: always
  type: dict
lines:
  description: The table and the findings.
  returned: always
  type: list
  elements: str
"""
