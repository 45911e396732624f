"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_dashboard
short_description: Serve a web page with the hosts, the runs and their curves
description:
  - Serves the dashboard on the controller until Ctrl-C, and prints its URL. On 127.0.0.1, the URL contains a token. On another address,
    the dashboard has TLS and a password.
  - The variable C(dashboard_password), for example of a vault, has the same effect as O(password_file) where other machines reach O(listen).
  - It connects to the hosts by OpenSSH with a key, or locally.
  - A host needs the variables C(cluster_data_dir) and C(cluster_python).
options:
  port:
    description: Port; 0 for any free one.
    type: int
    default: 5000
  listen:
    description: IP address of the controller. One that is not loopback needs a password.
    type: str
    default: 127.0.0.1
  password_file:
    description: File of mode 0600 on the controller with the password, or with its hash.
    type: str
    default: ""
  certificate:
    description: PEM file of the TLS certificate. By default one that the dashboard makes and signs itself.
    type: str
    default: ""
  key:
    description: PEM file of the key of O(certificate).
    type: str
    default: ""
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
