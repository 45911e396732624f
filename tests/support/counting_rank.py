"""A rank that counts steps instead of training: it takes the place of torchrun where a test needs many runs within a minute.

    counting_rank.py ... SPEC --run-dir=RUN_DIR ...

It keeps to the contract of the run folder: heartbeat, `stop`, checkpoints with a manifest, result. It counts to `max_steps` of the spec,
20 steps a second, and writes a checkpoint every `checkpoint_interval` steps and when it stops. The "loss" is the sum of all steps, so
that a lost or repeated step changes it. `samples.txt` lists the steps of a checkpoint's history. It is the only rank of its run.

A rank locks a file for each of its GPUs. If another run has the lock, it writes a line to `overlaps` in the folder $SHARED,
which a variable of the run opens.
"""

import ctypes
import fcntl
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
    run_dir = Path(flag("run-dir"))
    spec = (run_dir / "spec.yml").read_text()
    steps, interval = (
        int(re.search(rf"^{name}: (\d+)$", spec, re.MULTILINE)[1]) for name in ("max_steps", "checkpoint_interval")
    )
    held = lock_gpus(run_dir)
    state = {"rank": 0, "pid": os.getpid(), "steps": steps, "note": "", "error": None}
    state |= {"tokens_per_second": 1.0, "eta": 1.0}
    done, status = count(run_dir, state, steps, interval)
    if status == "finished":
        result = {"run": run_dir.name, "status": status, "step": steps, "steps": steps, "world_size": 1, "hosts": 1}
        result |= {"loss_first": 1.0, "loss_last": float(sum(done)), "tokens": 1, "samples": 1}
        write(run_dir / "result.json", result | {"tokens_per_second": 1.0, "adapter": "adapter"})
    heartbeat(run_dir, state | {"status": status, "step": len(done), "loss": float(sum(done))})
    for file in held:
        file.close()


def flag(name, default=None):
    """Return the value of a flag of torchrun or of the trainer."""
    return next((word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}=")), default)


def lock_gpus(run_dir):
    """Return the locked files of the GPUs that the rank may use; record those that another run has."""
    shared, files = Path(os.environ.get("SHARED", run_dir)), []
    for gpu in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        files.append((shared / f"held-{gpu}").open("a+"))
        try:
            fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            files[-1].seek(0)
            with (shared / "overlaps").open("a") as overlaps:
                overlaps.write(f"{time.time():.2f} {run_dir.name} got {gpu}, which {files[-1].read()} has\n")
        else:
            files[-1].truncate(0)
            files[-1].write(run_dir.name)
            files[-1].flush()
    return files


def count(run_dir, state, steps, interval):
    """Count; return the steps and how it ended."""
    done, stop = resume(run_dir), False
    while len(done) < steps and not stop:
        time.sleep(SECONDS)
        done.append(len(done) + 1)
        heartbeat(run_dir, state | {"status": "training", "step": len(done), "loss": float(sum(done))})
        stop = (run_dir / "stop").exists()
        if stop or len(done) % interval == 0:
            save(run_dir, done)
    return done, "finished" if len(done) == steps else "stopped"


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
    write(run_dir / f"state/rank{state['rank']}.json", state | {"time": time.time()})


def write(path, value):
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(value))
    aside.replace(path)


main()
