"""Act as another user for a part of a module that runs as root. Standard library only."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator


@contextlib.contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[None]:
    """Act as a user within the block, with the user's groups. Does nothing without root."""
    if os.geteuid() != 0 or user.pw_uid == 0:
        yield
        return
    groups = os.getgroups()
    group = os.getegid()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
