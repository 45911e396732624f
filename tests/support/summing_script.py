"""A script for `script` of the run spec: the ranks add up their numbers, step by step, and keep the sum in checkpoints.

Step N adds N on every rank, so the sum after the last step shows a lost or repeated one. A checkpoint is read by the rank that has the
newest one, which sends it to the others.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml


def newest(folder):
    """Return step and sum of the newest complete checkpoint of this host."""
    complete = [path for path in folder.glob("step-*") if (path / "manifest.json").exists()]
    return tuple(json.loads((max(complete) / "state.json").read_text())) if complete else (0, 0)


def save(folder, step, total):
    """Write a checkpoint, with the manifest that lets the queue carry it to another host."""
    aside = folder / f".tmp-{step}"
    aside.mkdir(exist_ok=True)
    (aside / "state.json").write_text(json.dumps([step, total]))
    size = (aside / "state.json").stat().st_size
    (aside / "manifest.json").write_text(json.dumps({"step": step, "files": {"state.json": {"bytes": size}}}))
    aside.rename(folder / f"step-{step:08d}")


def main():
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    checkpoints = Path(os.environ["TRAINYARD_CHECKPOINTS"])
    metrics = Path(os.environ["TRAINYARD_RUN_DIR"], "metrics.jsonl")
    spec = yaml.safe_load(Path(os.environ["TRAINYARD_SPEC"]).read_text())
    dist.init_process_group("gloo")
    leader = os.environ["LOCAL_RANK"] == "0"
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, newest(checkpoints))
    first, total = max(found)
    print(f"begins after step {first}", flush=True)
    for step in range(first + 1, spec["max_steps"] + 1):
        time.sleep(0.05)
        # All ranks stop after the same step.
        number = torch.tensor([float(step), float(bool(stop))])
        dist.all_reduce(number)
        total += int(number[0])
        if leader:
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "steps": spec["max_steps"], "loss": total}) + "\n")
        if leader and (number[1] or step % spec["checkpoint_interval"] == 0):
            save(checkpoints, step, total)
        if number[1]:
            break
    else:
        if leader:
            Path(os.environ["TRAINYARD_RESULT"]).write_text(json.dumps({"total": total, "first": first}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
