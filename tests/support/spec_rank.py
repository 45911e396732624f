"""A rank that trains nothing: it records the learning rate of the spec in its run folder at its start and at its end.

    spec_rank.py ... SPEC --run-dir=RUN_DIR ...

It takes the place of torchrun, so that a test can make many short runs. The result is a result.json with `lrs`, the
learning rates that it saw. The environment variable `lr_env` has the value from the file `env`. With FAILS=1 it fails
instead; SECONDS is how long it takes, 1.0 if not set.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as the trainer does
    words = [word.partition("=") for word in sys.argv]
    run_dir = Path(next(value for name, _, value in words if name == "--run-dir"))
    rank = int(next(value for name, _, value in words if name == "--node-rank"))

    def seen():
        return float(re.search(r"^lr: (\S+)$", (run_dir / "spec.yml").read_text(), re.MULTILINE)[1])

    lrs = [seen()]
    state = {"rank": rank, "pid": os.getpid(), "steps": 1, "loss": 1.0, "note": "", "error": None}
    write(run_dir / f"state/rank{rank}.json", state | {"status": "training", "step": 0, "time": time.time()})
    if os.environ.get("FAILS"):
        sys.exit(1)
    time.sleep(float(os.environ.get("SECONDS", "1.0")))
    lrs.append(seen())
    result = {"run": run_dir.name, "status": "finished", "step": 1, "steps": 1, "world_size": 2, "lrs": lrs}
    result |= {"loss_first": 2.0, "loss_last": 1.0, "tokens": 1, "samples": 1, "tokens_per_second": 1.0}
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    write(run_dir / "result.json", result | {"adapter": "adapter", "lr_env": os.environ.get("LR", "")})
    write(run_dir / f"state/rank{rank}.json", state | {"status": "finished", "step": 1, "time": time.time()})


def write(path, value):
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(value))
    aside.replace(path)


main()
