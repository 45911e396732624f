"""A rank that follows the contract of the run folder (docs/internals/run-folder.md) without torch, and fails on request.

    fake_rank.py STEPS SECONDS_PER_STEP

The environment variable FAKE is RANK:STEP:FAULT, the fault of that rank at that step:
    raise, plain, exit, kill, hang
    deaf    continue, but ignore `stop` and SIGTERM
    eat     allocate 1.5 GiB of memory
    child   start a process in another session, then die by SIGKILL

If PEERS names a common file, the other ranks then fail because they lose their peer, as real ranks do.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

RUN_DIR, RANK = Path(os.environ["TRAINYARD_RUN_DIR"]), int(os.environ["RANK"])
STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2])
FAULTY_RANK, FAULTY_STEP, FAULT = os.environ.get("FAKE", "-1:0:").split(":")
PEERS = Path(os.environ.get("PEERS", "/nonexistent/broken"))


def write_state(**values):
    state = {"rank": RANK, "pid": os.getpid(), "time": time.time(), "steps": STEPS, "note": "", "error": None}
    state |= {"loss": 5.31, "tokens_per_second": 1890.2, "eta": 42.0}
    file = RUN_DIR / f"state/rank{RANK}.json"
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(state | values))
    temporary.replace(file)


def fail(step, kind, message, plain=False, secondary=False):
    error = {"type": kind, "message": message, "plain": plain, "secondary": secondary}
    error["traceback"] = traceback.format_exc()
    write_state(status="failed", step=step, error=error)
    sys.exit(1)


def cause(fault, step):
    if fault in ("raise", "plain", "exit", "kill", "child") and PEERS.parent.is_dir():
        PEERS.touch()
    if fault == "raise":
        try:
            raise ZeroDivisionError("the loss is not a number")
        except ZeroDivisionError as error:
            print("just before the end", flush=True)
            time.sleep(0.3)  # the peers report first
            fail(step, "ZeroDivisionError", str(error))
    elif fault == "plain":
        fail(step, "UserError", "dataset.jsonl:3 is not JSON", plain=True)
    elif fault == "exit":
        sys.exit(3)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "eat":
        blocks = [os.urandom(1 << 24) for _ in range(96)]  # 1.5 GiB, then sleep: there may be no memory limit
        time.sleep(3600 + len(blocks))
    elif fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif fault == "child":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as the trainer does
    if os.getppid() != parent:
        os._exit(1)
    log = os.open(RUN_DIR / f"logs/rank{RANK}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    deaf = False
    write_state(status="starting", step=0, loss=None)
    for step in range(1, STEPS + 1):
        print(f"rank {RANK} step {step}", flush=True)
        if int(FAULTY_RANK) == RANK and int(FAULTY_STEP) == step:
            deaf = FAULT == "deaf"
            cause(FAULT, step)
        if PEERS.exists():
            fail(step, "RuntimeError", "Connection closed by peer", secondary=True)
        if (RUN_DIR / "stop").exists() and not deaf:
            return write_state(status="stopped", step=step)
        write_state(status="training", step=step)
        time.sleep(PAUSE)
    return write_state(status="finished", step=STEPS)


if __name__ == "__main__":
    main()
