"""A rank that counts steps instead of training: it takes the place of torchrun where a test needs many runs within a minute.

    counting_rank.py ... SPEC --run-dir=RUN_DIR ...

It keeps to the contract of the run folder: heartbeat, `stop`, checkpoints with a manifest, result. It counts to `max_steps` of the spec,
20 steps a second, and writes a checkpoint every `checkpoint_interval` steps and when it stops. The "loss" is the sum of all steps, so
that a lost or repeated one shows. Only for runs on one host. `samples.txt` lists the steps of a checkpoint's history.
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

SECONDS = 0.05


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as the trainer does
    run_dir = Path(next(word.partition("=")[2] for word in sys.argv if word.startswith("--run-dir=")))
    spec = (run_dir / "spec.yml").read_text()
    steps, interval = (
        int(re.search(rf"^{name}: (\d+)$", spec, re.MULTILINE)[1]) for name in ("max_steps", "checkpoint_interval")
    )
    done = resume(run_dir)
    state = {"rank": 0, "pid": os.getpid(), "steps": steps, "note": "", "error": None}
    state |= {"tokens_per_second": 1.0, "eta": 1.0}
    while len(done) < steps:
        time.sleep(SECONDS)
        done.append(len(done) + 1)
        heartbeat(run_dir, state | {"status": "training", "step": len(done), "loss": float(sum(done))})
        stop = (run_dir / "stop").exists()
        if stop or len(done) % interval == 0:
            save(run_dir, done)
        if stop:
            heartbeat(run_dir, state | {"status": "stopped", "step": len(done), "loss": float(sum(done))})
            return
    result = {"run": run_dir.name, "status": "finished", "step": steps, "steps": steps, "world_size": 1, "hosts": 1}
    result |= {"loss_first": 1.0, "loss_last": float(sum(done)), "tokens": 1, "samples": 1, "tokens_per_second": 1.0}
    write(run_dir / "result.json", result | {"adapter": "adapter"})
    heartbeat(run_dir, state | {"status": "finished", "step": steps, "loss": float(sum(done))})


def resume(run_dir):
    for folder in sorted((run_dir / "checkpoints").glob("step-*"), reverse=True):
        text = (folder / "samples.txt").read_text()
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["files"]["samples.txt"]["sha256"] == hashlib.sha256(text.encode()).hexdigest():
            return [int(line) for line in text.split()]
    return []


def save(run_dir, done):
    folder = run_dir / f"checkpoints/step-{len(done):08d}"
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    text = "\n".join(map(str, done))
    (aside / "samples.txt").write_text(text)
    entry = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    write(aside / "manifest.json", {"files": {"samples.txt": entry}, "finite": True})
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)


def heartbeat(run_dir, state):
    write(run_dir / "state/rank0.json", state | {"time": time.time()})


def write(path, value):
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(value))
    aside.replace(path)


main()
