"""Documentation that the modules share."""

from __future__ import annotations


class ModuleDocFragment:
    """Fragments: C(trainyard) for every module, C(trainyard.info) and C(trainyard.files) on top of it."""

    DOCUMENTATION = r"""
options: {}
author: The trainyard authors (@trainyard)
"""

    # For modules that only read.
    INFO = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: The module changes nothing.
"""

    # For modules that write files.
    FILES = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: Can run in check mode and return the expected status without changing the host.
  diff_mode:
    support: full
    description: Returns the differences between the old and the new content.
"""
