"""Documentation of the action plugin of this name. It runs on the controller, once for all hosts of the play."""

from __future__ import annotations

DOCUMENTATION = r"""
module: teacher_copy
short_description: Find the hosts that lack the teacher of playbooks/distill.yml, or copy it to them
description:
  - An adapter to C(trainyard.ollama.model_copy). Without O(files), it checks the options of the playbook and returns which hosts of the
    play lack the teacher, and which host of the cluster has it.
  - With O(files), it copies these from a folder of O(source) to those of the O(targets), from host to host.
options:
  source:
    description: Host that has the model.
    type: str
  targets:
    description: Hosts that lack it.
    type: list
    elements: str
  folders:
    description: Path of the folder of the login user on these hosts; the SHA-1 of the name of the host follows.
    type: str
  files:
    description: Files of the model as M(ollama_staging) returns them.
    type: dict
attributes:
  check_mode:
    support: full
    description: The playbook copies nothing in check mode.
author: trainyard
"""

EXAMPLES = r"""
- name: Find the hosts that lack the teacher
  teacher_copy:
  register: teacher
  run_once: true
"""

RETURN = r"""
source:
  description: Host that has the teacher.
  returned: if a host lacks it
  type: str
targets:
  description: Hosts that lack the teacher.
  returned: without O(files)
  type: list
  elements: str
stores:
  description: Folder of Ollama's models by host.
  returned: if a host lacks the teacher
  type: dict
"""
