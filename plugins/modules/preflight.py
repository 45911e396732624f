"""Documentation of the action plugin of this name: it runs on the controller, for all hosts of the play at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Find what would spoil a run, on every host and between every two
description:
  - Asks every host at once what it is and who else is at work there; has every host listen and connect to all others on the
    rendezvous port and on random high ones; runs a real all-reduce over all of them. Names each trouble with its remedy.
  - Fails when a run would fail. What may only slow it down is a warning. Changes nothing.
  - What train.yml asks before every run (M(trainyard_run), and this with O(plan)) is judged by the same code.
options:
  run:
    description: A run whose trainer is to be the same everywhere.
    type: str
    default: ""
  master_port:
    description: Rendezvous port. By default 29500.
    type: int
  quick:
    description: Leave the all-reduce out. Lines are then measured with plain sockets alone.
    type: bool
    default: false
  json:
    description: File on the controller for the report, or C(true) to print it in place of the table.
    type: str
    default: ""
  plan:
    description:
      - A run's plan, as M(trainyard_run) returned it. Only what is between its hosts is looked at then, at its rendezvous port and
        high ones; what each host is has been asked by M(trainyard_run).
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    support: full
    description: The same in check mode.
author: trainyard
"""

EXAMPLES = r"""
- name: Find troubles
  preflight:
    json: report.json
  run_once: true
"""

RETURN = r"""
exit:
  description: 0 for nothing found, 1 for warnings, 2 for failures.
  returned: always
  type: int
findings:
  description: C(check), C(host) (empty for the whole cluster), C(level) (failure, warning, note), C(text), C(remedy), the worst first.
  returned: always
  type: list
  elements: dict
hosts:
  description: What every host answered.
  returned: always
  type: dict
all_reduce:
  description: C(mbit), C(latency_ms) and C(torch) of the all-reduce over all hosts; null where there was none.
  returned: always
  type: dict
lines:
  description: Table and findings.
  returned: always
  type: list
  elements: str
"""
