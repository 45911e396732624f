"""A rank that keeps the run folder's contract (docs/run-folder.md) without torch: it beats, and breaks as it is told.

    fake_rank.py STEPS SECONDS_A_STEP

FAKE in its environment is RANK:STEP:DEED, for what that rank does at that step: raise, plain, exit, kill, hang, deaf (go on
but heed neither `stop` nor SIGTERM), eat (1.5 GiB of memory), child (leave a process in a session of its own, then die by SIGKILL), secret (print the
variable SECRET). When one has broken, the others fail by losing their peer, as real ones do, if PEERS names a common file.
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
WHO, WHEN, DEED = os.environ.get("FAKE", "-1:0:").split(":")
PEERS = Path(os.environ.get("PEERS", "/nonexistent/broken"))


def beat(**values):
    state = {"rank": RANK, "pid": os.getpid(), "time": time.time(), "steps": STEPS, "note": "", "error": None}
    state |= {"loss": 5.31, "tokens_per_second": 1890.2, "eta": 42.0}
    file = RUN_DIR / f"state/rank{RANK}.json"
    aside = file.with_name(f".{file.name}.tmp")
    aside.write_text(json.dumps(state | values))
    aside.replace(file)


def fail(step, kind, message, plain=False, secondary=False):
    told = {
        "type": kind,
        "message": message,
        "traceback": traceback.format_exc(),
        "plain": plain,
        "secondary": secondary,
    }
    beat(status="failed", step=step, error=told)
    sys.exit(1)


def do(deed, step):
    if deed in ("raise", "plain", "exit", "kill", "child") and PEERS.parent.is_dir():
        PEERS.touch()
    if deed == "raise":
        try:
            raise ZeroDivisionError("the loss is not a number")
        except ZeroDivisionError as error:
            print("just before the end", flush=True)
            time.sleep(0.3)  # the peers complain first
            fail(step, "ZeroDivisionError", str(error))
    elif deed == "plain":
        fail(step, "UserError", "dataset.jsonl:3 is not JSON", plain=True)
    elif deed == "exit":
        sys.exit(3)
    elif deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "hang":
        time.sleep(3600)
    elif deed == "eat":
        hoard = [os.urandom(1 << 24) for _ in range(96)]  # 1.5 GiB, then rest: whoever runs this may lack a limit
        time.sleep(3600 + len(hoard))
    elif deed == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif deed == "child":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "secret":
        print(os.environ["SECRET"], flush=True)


def main():
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as the trainer does
    if os.getppid() != parent:
        os._exit(1)
    log = os.open(RUN_DIR / f"logs/rank{RANK}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    deaf = False
    beat(status="starting", step=0, loss=None)
    for step in range(1, STEPS + 1):
        print(f"rank {RANK} step {step}", flush=True)
        if int(WHO) == RANK and int(WHEN) == step:
            deaf = DEED == "deaf"
            do(DEED, step)
        if PEERS.exists():
            fail(step, "RuntimeError", "Connection closed by peer", secondary=True)
        if (RUN_DIR / "stop").exists() and not deaf:
            return beat(status="stopped", step=step)
        beat(status="training", step=step)
        time.sleep(PAUSE)
    return beat(status="finished", step=STEPS)


if __name__ == "__main__":
    main()
