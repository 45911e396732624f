"""Documentation of the action plugin of this name: it runs on the controller, nothing of it on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_spec
short_description: Settle what a run is, on the controller, before any host is touched
description:
  - Reads the run spec from a file and from what was said with C(-e), and refuses names that nothing reads and bad values.
  - Checks the dataset line by line and the model's folder; makes the embedded dataset and the tiny model once.
  - Packs the trainer into an archive that has the same bytes for the same sources.
options:
  file:
    description: YAML file of the spec on the controller; C(-e) goes over it. Empty for none.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Nothing is kept on the controller.
author: trainyard
"""

EXAMPLES = r"""
- name: Check the run spec
  run_spec:
    file: run.yml
  register: run
  run_once: true
"""

RETURN = r"""
run:
  description: The run's name, made of the model's name and a digest of the spec if it was given none.
  returned: success
  type: str
spec:
  description: Every field of the run spec, and C(rows_per_step).
  returned: success
  type: dict
files:
  description: What has to be on every host - C(kind), C(src), C(dest) below the data dir, C(sha256) of each file, C(bytes).
  returned: success
  type: list
  elements: dict
bytes:
  description: Size of all of it.
  returned: success
  type: int
"""
