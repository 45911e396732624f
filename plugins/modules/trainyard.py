"""Documentation of the action plugin of this name, which runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainyard
short_description: Run a command of trainyard for all hosts of the play
description:
  - Runs a command of C(trainyard.commands.table), as the program C(trainyard) does. docs/command-line.md lists the commands and their options.
  - An option is the variable of its name, from C(-e), the play or the inventory. The fields of a run spec come from C(-e) alone.
  - A host needs the variables C(cluster_address), C(cluster_data_dir) and C(cluster_python).
options:
  command:
    description:
      - Name of the command, such as C(status). For C(queue), the variable C(do) has the verb.
      - Roles use C(plan-python), see C(trainyard.commands.role_steps).
    type: str
    required: true
  options:
    description: Options of the command and launch options. With it, the variables of the names of the command's options have no effect.
    type: dict
  step:
    description: With C(train), the only step to do. The steps follow one another in this order.
    type: str
    choices: ["", prepare, plan, preflight, stage, launch, follow, collect]
    default: ""
  session:
    description: RV(session) of the step before; none before C(prepare).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Hosts are asked, and nothing is changed. The result says what would be.
author: The trainyard authors (@trainyard)
"""

EXAMPLES = r"""
- name: Stop a run after a checkpoint
  trainyard:
    command: stop
    options:
      run: my-run
  run_once: true

- name: Plan the run
  trainyard:
    command: train
    step: plan
    session: "{{ run.session }}"
  register: run
  run_once: true
"""

RETURN = r"""
lines: {description: What the callback C(trainyard) prints., returned: if there is something to print, type: list, elements: str}
session: {description: "State of the run after the step, for the next one.", returned: with O(step), type: dict}
runs:
  description: For C(status), every run on every host, as C(trainer.supervise status) returns it, with C(host).
  returned: for C(status) and C(queue)
  type: list
  elements: dict
hosts: {description: The result of each host., returned: for commands and steps that act on hosts, type: dict}
result: {description: "The head's result.json.", returned: for the step C(collect), type: dict}
"""
