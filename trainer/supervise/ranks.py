"""The ranks of one host as their supervisor sees them: their processes, and the first failure."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.processes import descendants, environ, is_running, process_stat
from trainer.supervise.run_files import rank_files, read_json
from trainer.supervise.status import ENDED_WELL

REPORT_LIMIT = 0.5  # s for torchrun to report the exit code of a rank that has exited
# s for torchrun to exit once its ranks have: its exit barrier would wait 300 s for a peer that has exited.
EXIT_LIMIT = 10.0

# torchrun's log message about a worker that died (torch/distributed/elastic/multiprocessing/api.py).
FAILED = re.compile(rb"failed \(exitcode: (-?\d+)\)\s+local_rank: (\d+) \(pid: (\d+)\)")


class RankMonitor:
    """Watches the ranks below one torchrun.

    `failures` has a record per failed rank; until torchrun reports exit codes, only of the first one.
    """

    def __init__(self, run_dir: LinkFreePath, log: LinkFreePath, ranks: list[int], *, renumbered: bool) -> None:
        """`log`: torchrun's, whose existing contents are skipped. `ranks`: of this host, by local rank. `renumbered`: they may change,

        as torchrun restarts its workers itself.
        """
        self.run_dir, self.ranks, self.renumbered = run_dir, ranks, renumbered
        self.failures: list[dict[str, Any]] = []
        self._count = len(ranks)  # the same after each restart
        self._log, self._log_offset = log, log.stat().st_size
        self._pids: dict[int, int] = {}  # by rank
        self._gone: dict[int, float] = {}  # rank: when its process was first missing
        self._all_done_since: float | None = None

    def update(self, torchrun: int) -> bool:
        """Read the state of the ranks' processes while torchrun runs; return whether ranks or failures changed.

        torchrun reports a dead worker only when it has stopped the other workers, which can take 30 s. Therefore
        this also checks the processes. torchrun's report, which alone has the exit code, replaces these records.
        """
        before = (list(self.failures), self.ranks)
        self.read_log()
        missing = len(self._pids) < self._count
        if missing or (self.renumbered and not all(map(is_running, self._pids.values()))):
            self._find_processes(torchrun)
        for rank, pid in self._pids.items():
            if rank not in self._gone and not is_running(pid) and not self.ended_well(rank):
                self._gone[rank] = time.monotonic()
        if self._gone and not self.failures:
            first = min(self._gone, key=lambda rank: self._gone[rank])
            if time.monotonic() - self._gone[first] > REPORT_LIMIT:
                self.failures = [failure(first, None, self._pids[first])]
        return (self.failures, self.ranks) != before

    def read_log(self) -> None:
        """Read the exit codes that torchrun has logged since the last call."""
        text = b""
        with contextlib.suppress(OSError), self._log.open_read() as file:  # a rank may have closed or replaced it
            if file.seek(0, os.SEEK_END) < self._log_offset:  # it was emptied because of its size
                self._log_offset = 0
            file.seek(self._log_offset)
            text = file.read()
        complete = text.rfind(b"\n") + 1
        self._log_offset += complete
        for code, local_rank, pid in FAILED.findall(text[:complete]):
            if int(local_rank) < len(self.ranks) and not self.ended_well(rank := self.ranks[int(local_rank)]):
                known = [entry for entry in self.failures if entry["exit_code"] is not None]
                self.failures = [*known, failure(rank, int(code), int(pid))]

    def exit_is_overdue(self) -> bool:
        """Return whether all ranks have ended as intended, and torchrun should have exited by now."""
        alive = not self._pids or any(map(is_running, self._pids.values()))
        if alive or not all(map(self.ended_well, self.ranks)):
            self._all_done_since = None
            return False
        self._all_done_since = self._all_done_since or time.monotonic()
        return time.monotonic() - self._all_done_since > EXIT_LIMIT

    def ended_well(self, rank: int) -> bool:
        return self.rank_state(rank).get("status") in ENDED_WELL

    def mistake(self) -> str:
        """Return the type of an error that a rank reported and that a user must fix, or an empty string."""
        errors = [self.rank_state(rank).get("error") or {} for rank in self.ranks]
        return next((str(error["type"]) for error in errors if error.get("plain")), "")

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return the last heartbeat of a rank; empty if there is none."""
        return read_json(self.run_dir / f"state/rank{rank}.json") or {}

    def _find_processes(self, torchrun: int) -> None:
        """Find the ranks' processes. A torchrun that restarts its workers may number them differently."""
        found: dict[int, int] = {}
        for pid in descendants(torchrun):
            # Children of a worker inherit RANK; the worker itself is a child of torchrun.
            if not (stat := process_stat(pid)) or stat[1] != torchrun:
                continue
            values = environ(pid)
            number = values.get("RANK", "")
            if number.isdigit():
                found[int(number)] = pid
        if self.renumbered and len(found) < self._count:
            return  # torchrun starts its workers one after the other, and only all of them show the numbering
        if self.renumbered and set(found.values()) - set(self._pids.values()):
            self._pids, self._gone, self.failures = {}, {}, []
            self.ranks = sorted(found)
            for heartbeat in rank_files(self.run_dir):
                if not is_running((read_json(heartbeat) or {}).get("pid", 0)):  # of the earlier numbering
                    with contextlib.suppress(OSError):
                        heartbeat.remove()
        for rank, pid in found.items():
            self._pids.setdefault(rank, pid)


def failure(rank: int, code: int | None, pid: int) -> dict[str, Any]:
    """Return the record of a failed rank; `code` is None while only its absence is known."""
    name = None
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
    return {"rank": rank, "exit_code": code, "signal": name, "pid": pid}
