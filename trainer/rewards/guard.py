"""The process between a rank and its rewards: it owns their time, their memory, and all processes that they start."""

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.data.limited_process import OUT_OF_MEMORY, LimitedProcess, LimitError
from trainer.supervise.processes import descendants, send_signal
from trainer.supervise.supervisor import PR_SET_CHILD_SUBREAPER, prctl

LATE = 76  # exit code
TICK, IDLE = 0.2, 2.0  # s between two looks at the processes during a call, and between calls
GRACE = 5.0  # s for the guard to end all processes; then the rank does, because a reward may have halted the guard
# A reward gets one thread and no GPU, which the ranks need.
_SET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_BEGIN, _END = b"+", b"-"  # of a call


class GuardedProcess(LimitedProcess):
    """A LimitedProcess below a guard. `memory`: bytes of all its processes. `wait`: seconds for one answer."""

    def __init__(self, module: str, memory: int, wait: float) -> None:
        self.wait, self.late = wait, False
        read, self._calls = os.pipe()
        more = [str(wait), str(read), module]
        super().__init__("trainer.rewards.guard", memory, 0, *more, stderr=None, pass_fds=(read,))
        os.close(read)

    def ask(self, value: object) -> Any:
        """Send a message and return the answer. Raises LimitError, also if both together take too long."""
        timer = threading.Timer(self.wait + GRACE, self._expire)
        timer.daemon = True
        timer.start()
        try:
            os.write(self._calls, _BEGIN)
            answer = super().ask(value)
            os.write(self._calls, _END)
        except OSError:
            raise LimitError(self._reason()) from None
        finally:
            timer.cancel()
        return answer

    def close(self) -> None:
        if self.owner == os.getpid() and self._calls >= 0:
            os.close(self._calls)  # the guard ends what is left, and itself
            self._calls = -1
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._expire()
        super().close()

    def _expire(self) -> None:
        self.late = True
        for pid in (*descendants(self._process.pid), self._process.pid):
            send_signal(pid, signal.SIGKILL)

    def _reason(self) -> str:
        reason = super()._reason()
        return f"it takes more than {self.wait:g} s" if self.late or self._process.returncode == LATE else reason


def main() -> int:
    """Start the rewards, and return their exit code, or that of the limit that they exceeded, when no process of theirs is left."""
    memory, wait, calls = int(sys.argv[1]), float(sys.argv[3]), int(sys.argv[4])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    rank, page = os.getppid(), os.sysconf("SC_PAGE_SIZE")
    rewards = subprocess.Popen([sys.executable, "-P", "-m", sys.argv[5], str(memory), "0"], env={**os.environ, **_SET})
    os.close(0)
    os.close(1)  # so that the rank sees the end of the rewards
    code, end = None, math.inf
    while (code := code or rewards.poll()) is None and os.getppid() == rank:
        if select.select([calls], [], [], IDLE if math.isinf(end) else TICK)[0]:
            word = os.read(calls, 1)
            if not word:
                break
            end = time.monotonic() + wait if word == _BEGIN else math.inf
        if time.monotonic() > end:
            code = LATE
        elif sum(map(_pages, descendants(os.getpid()))) * page > memory:
            code = OUT_OF_MEMORY
    while left := descendants(os.getpid()):
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    if os.getppid() == rank:
        os.kill(rank, signal.SIGCONT)  # a reward may have halted it
    return 0 if code is None else code if code >= 0 else 128 - code


def _pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    os._exit(main())
