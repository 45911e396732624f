"""Time to copy a file to one host and to many hosts, from host to host and from the controller.

    sudo make bench NAME=relay [ARGS='--hosts 20 --mb 200 --mbit 50 --controller']

The hosts are network namespaces with an SSH server each, whose ports are shaped in both directions. Requires root (ip, tc,
sshd). Takes about two minutes; --controller adds the copies from the controller only, whose duration is proportional to
the number of hosts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ssh_lab import SSHLab, ssh_lab

from trainer.files import sha256_file
from trainyard.run.transfer import copy_to_hosts


def main() -> int:
    """Print one row per way and number of hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--mb", type=int, default=200, help="size of the file in megabytes")
    parser.add_argument("--mbit", type=int, default=50, help="speed of every port; 0: not shaped")
    parser.add_argument("--controller", action="store_true", help="also copy from the controller to all hosts")
    a = parser.parse_args()
    if os.geteuid():
        parser.error("this benchmark requires root for network namespaces: run it with sudo")
    with tempfile.TemporaryDirectory(prefix="trainyard-relay-") as name, ssh_lab(Path(name), a.hosts, a.mbit) as lab:
        source = Path(name) / "data.jsonl"
        source.write_bytes(os.urandom(a.mb * 1_000_000))
        digest = sha256_file(source)
        print("| hosts | transfer | seconds | relative to one host | MB from the controller |")
        print("| --- | --- | --- | --- | --- |")
        one = 0.0
        cases = [(1, "controller"), (a.hosts, "auto"), *([(a.hosts, "controller")] if a.controller else [])]
        for number, (count, transfer) in enumerate(cases):
            entry = {"kind": "dataset", "src": str(source), "dest": f"store/datasets/{number}.jsonl", "digest": digest}
            seconds, sent = copy(lab, count, entry | {"sha256": {"": digest}}, transfer)
            one = one or seconds
            print(f"| {count} | {transfer} | {seconds:.1f} | {seconds / one:.2f} x | {sent / 1e6:.1f} |", flush=True)
    return 0


def copy(lab: SSHLab, count: int, file: dict[str, Any], transfer: str) -> tuple[float, int]:
    """Copy a file to the first `count` hosts; return the seconds, and the bytes that left the controller."""
    before, start = lab.sent(), time.monotonic()
    changed = lab.run(lambda: copy_to_hosts(lab.entries()[:count], [file], lab.connect, f"t{start}", transfer=transfer))
    seconds = time.monotonic() - start
    assert len(changed) == count and all(changed.values()), changed
    return seconds, lab.sent() - before


if __name__ == "__main__":
    sys.exit(main())
