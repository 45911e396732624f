"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard_queue
short_description: Add runs to the queue, list them, and change those that wait
description:
  - An adapter to C(trainyard.queue.manage.manage_queue). It reads the verb C(do), the options of the queue, the run spec and
    the launch options from C(-e) and the inventory. docs/queue.md lists them.
  - C(do=add) checks the runs, copies their files to the queue host and submits one job of Slurm for each. The queue host
    starts a run on hosts of the play.
  - The other verbs ask the queue host. They change no file.
options: {}
attributes:
  check_mode:
    support: full
    description: Nothing is copied, added or changed. The result says what would be.
author: trainyard
"""

EXAMPLES = r"""
- name: Manage the queue
  trainyard_queue:
  run_once: true
"""

RETURN = r"""
runs:
  description: The runs that were added, listed or changed.
  returned: success
  type: raw
lines:
  description: What the callback C(trainyard) prints.
  returned: success
  type: list
  elements: str
"""
