"""Three students at once on three hosts, compared with one student on one host: duration of playbooks/distill.yml.

    sudo make bench NAME=students [ARGS='--rounds 2 --steps 40']

The three lab hosts have equal CPU quotas that together are one core, so that they share nothing but the controller. The answers
of the teacher, a stand-in with Ollama's API, are collected beforehand. Requires root on Debian or Ubuntu. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fake_teacher import Teacher, serve
from lab_hosts import VENV, Lab, inventory_with, run_playbook
from run_hosts import TOP, free_port
from testbed import faults, machine

from benchmarks.inputs import build_inputs
from benchmarks.linked_hosts import prioritize
from trainyard.ollama.answers import answers_path

SHARE = 33  # percent of one core for each host
PROMPTS = 120


def seconds(inventory: Path, students: int, **variables: Any) -> float:
    """Return the duration of distill.yml with this number of students."""
    model, _ = build_inputs()
    start = time.perf_counter()
    played = run_playbook("playbooks/distill.yml", inventory, {"model": ",".join([str(model)] * students), **variables})
    if played.rc:
        raise SystemExit(played.stdout)
    return time.perf_counter() - start


def main() -> None:
    """Run the rounds, and print the durations and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    a = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    teacher = Teacher("127.0.0.2", free_port(), slots=4, model=f"students{os.getpid()}:latest")
    lab = Lab(f"students-{os.getpid()}")
    answers = answers_path(TOP / ".trainyard", teacher.model)
    try:
        with tempfile.TemporaryDirectory() as folder, serve(teacher):
            lab.up(hosts=3, venv=VENV, persistent=False)
            prompts = Path(folder, "prompts.jsonl")
            lines = (json.dumps({"prompt": f"What follows {n}?"}) for n in range(PROMPTS))
            prompts.write_text("\n".join(lines))
            made = run_playbook("site.yml", lab.inventory, None, "--tags storage")
            if made.rc:
                raise SystemExit(made.stdout)
            inventory = inventory_with(lab, Path(folder), ollama_url=teacher.url)
            fields = {"teacher": teacher.model, "prompts": str(prompts), "near_duplicates": 0, "loggers": "none"}
            fields |= {
                "seq_length": 64,
                "total_batch_size": 8,
                "epochs": 100,
                "eval_interval": 0,
                "checkpoint_interval": 0,
            }
            fields |= {"unit_properties": ["CPUAffinity=0"], "progress_interval": 10}
            seconds(
                inventory, 3, run="first", max_steps=1, **fields
            )  # collects the answers, and stages model and trainer
            top, unified = machine.cgroup_of("cpu")
            prioritize(top / f"trainyard-{lab.name}", unified)
            for host in lab.hosts:
                faults.inject(lab, host, "cpu", str(SHARE))
            ratios = []
            for number in range(a.rounds):
                one, three = (
                    seconds(inventory, count, run=f"of{count}-{number}", max_steps=a.steps, **fields)
                    for count in (1, 3)
                )
                ratios.append(three / one)
                print(f"one student: {one:.1f} s, three at once: {three:.1f} s, ratio {ratios[-1]:.2f}", flush=True)
            print(f"median ratio: {statistics.median(ratios):.2f}")
    finally:
        lab.down()
        for file in (answers, *(TOP / ".trainyard/distill").glob(f"{answers.stem}-*.jsonl")):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
