"""Stands in for trainer.launch.standby_process and trainer.launch.torchrun where a test needs no torch.

The arguments of its "torchrun" are those of fake_rank.py, which runs as rank 0. FAKE_STANDBY is how long it "imports"; a
variable REFUSE makes it refuse every request.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FAKE_RANK = Path(os.environ["FAKE_RANK"])


def be_torchrun(request, supervisor):
    """Act as a torchrun with one rank, which is its child."""
    middle = os.getppid()
    while middle != supervisor and os.getppid() == middle:
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    env = request["env"] | {"RANK": "0", "LOCAL_RANK": "0"}
    rank = os.spawnve(os.P_NOWAIT, sys.executable, [sys.executable, str(FAKE_RANK), *request["arguments"]], env)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    os.write(2, b"failed (exitcode: %d) local_rank: 0 (pid: %d)\n" % (code, rank) if code else b"")
    os._exit(1 if code else 0)


def main():
    supervisor = os.getppid()
    channel = socket.socket(fileno=int(sys.argv[1]))
    time.sleep(float(os.environ.get("FAKE_STANDBY", "0")))
    print("imported", flush=True)
    for line in channel.makefile("rb"):
        request = json.loads(line)
        if "REFUSE" in os.environ:
            channel.sendall(b'{"refused": "a test"}\n')
            continue
        read, write = os.pipe()
        if (middle := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                channel.close()
                be_torchrun(request, supervisor)
            os.write(write, b"%d" % pid)
            os._exit(0)
        os.close(write)
        os.waitpid(middle, 0)
        channel.sendall(json.dumps({"pid": int(os.read(read, 32))}).encode() + b"\n")
        os.close(read)


def torchrun():
    """Run rank 0 to its end, with the arguments of fake_rank.py."""
    return subprocess.run([sys.executable, FAKE_RANK, *sys.argv[1:]], env=os.environ | {"RANK": "0"}, check=False)


if __name__ == "__main__":
    sys.exit(torchrun().returncode if __spec__.name.endswith("torchrun") else main())
