"""A rank that starts processes which leave their session and parents, without a mark of the run, then works as `fake_rank.py`.

    hiding_rank.py STEPS SECONDS_PER_STEP [orphan]

The file `hidden` of the run folder gets their pids. With `orphan` the rank kills its supervisor.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

RUN_DIR = Path(os.environ["TRAINYARD_RUN_DIR"])
PR_SET_DUMPABLE = 4


def clear() -> None:
    os.execve("/bin/sleep", ["sleep", "3600"], {})


def overwrite() -> None:
    """Overwrite the memory in which this program received its environment, which /proc/PID/environ shows (proc(5))."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    os.environ.clear()
    ctypes.memmove(start, b"A=".ljust(end - start, b"\0"), end - start)
    time.sleep(3600)


def forbid_reading() -> None:
    """Let root alone read the environment, as for a program that forbids core dumps."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    time.sleep(3600)


def start_hidden(hide) -> int:
    """Fork twice, into another session; return the pid of the process that `hide` keeps running."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        os.waitpid(child, 0)
        return int(os.read(reader, 20))
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(writer, str(os.getpid()).encode())
    os.closerange(3, 64)
    hide()
    os._exit(1)


def main() -> None:
    hidden = [start_hidden(hide) for hide in (clear, overwrite, forbid_reading)]
    (RUN_DIR / "hidden.tmp").write_text(json.dumps(hidden))
    (RUN_DIR / "hidden.tmp").replace(RUN_DIR / "hidden")
    if sys.argv[3:] == ["orphan"]:
        os.kill(json.loads((RUN_DIR / "state/node.json").read_text())["pid"], signal.SIGKILL)
    runpy.run_path(str(Path(__file__).with_name("fake_rank.py")), run_name="__main__")


main()
