"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_dashboard
short_description: Serve a web page with the hosts, the runs and their curves
description:
  - Serves the dashboard on 127.0.0.1 of the controller until Ctrl-C, and prints its URL, which contains a token.
  - It connects to the hosts by OpenSSH with a key, or locally.
  - A host needs the variables C(cluster_data_dir) and C(cluster_python).
options:
  port:
    description: Port on 127.0.0.1; 0 for any free one.
    type: int
    default: 5000
attributes:
  check_mode:
    support: full
    description: Nothing is served.
author: trainyard
"""

EXAMPLES = r"""
- name: Serve until Ctrl-C
  trainyard_dashboard:
    port: 5000
  run_once: true
"""

RETURN = r"""
lines:
  description: Empty.
  returned: when the dashboard has ended
  type: list
  elements: str
"""
