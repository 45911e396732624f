"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_runs
short_description: List, stop or follow training runs
description:
  - C(listed) returns every run of every host. It changes nothing.
  - C(stopped) lets the ranks save a checkpoint and exit, then sends SIGTERM, then SIGKILL. It returns when no process of
    the run is left.
  - C(followed) prints progress until the run ends. The first failure anywhere stops all ranks; nothing restarts them.
  - A host needs the variables C(cluster_data_dir) and C(cluster_python).
options:
  state:
    description: What to do.
    type: str
    required: true
    choices: [listed, stopped, followed]
  run:
    description: Name of the run. With C(listed) it may be empty, for all runs.
    type: str
    default: ""
  grace:
    description: Seconds that the ranks have to save a checkpoint and exit.
    type: float
    default: 60.0
  force:
    description: Kill the ranks at once, without a checkpoint.
    type: bool
    default: false
  all:
    description:
      - With C(stopped), stop every run of every host. I(run) must be empty.
      - With C(listed), the table has all runs. By default it has the runs that are alive and the 10 that were started last
        of the others.
    type: bool
    default: false
  watch:
    description: With C(listed), print the list again every I(interval) seconds until no run is alive.
    type: bool
    default: false
  hardware:
    description: With C(listed), list the hardware and the Ollama models of every host, too.
    type: bool
    default: false
  interval:
    description: Seconds between two lists.
    type: float
    default: 5.0
attributes:
  check_mode:
    support: full
    description: Nothing is stopped. The result says what would be.
author: trainyard
"""

EXAMPLES = r"""
- name: Stop a run after a checkpoint
  trainyard_runs:
    state: stopped
    run: my-run
  run_once: true
"""

RETURN = r"""
runs:
  description: Every run on every host, as C(trainer.supervise status) returns it, with C(host).
  returned: listed
  type: list
  elements: dict
troubles:
  description: Hosts that did not answer, with the reason.
  returned: listed, and if stopped fails
  type: dict
hosts:
  description: How each host's part of the run ended.
  returned: stopped and followed
  type: dict
lines:
  description: What the callback C(trainyard) prints.
  returned: always but in check mode
  type: list
  elements: str
"""
