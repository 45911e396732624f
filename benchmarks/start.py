"""Time from the command to the first all-reduce: train.yml and `trainyard train` against torchrun started by hand; and the skew of rank starts.

    sudo make bench NAME=start [ARGS='--rounds 5 --many 20']

"By hand" means that all files are on the hosts and the rendered commands are sent to all hosts at once over SSH. The hosts share the
clock of this machine, so times are comparable. Requires root on Debian or Ubuntu: it starts a lab. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import yaml
from testbed import root
from testbed.lab import Lab, LabHost

TOP = Path(__file__).resolve().parents[1]
DATA = root.DATA_DIR
SPEC = {"seq_length": 64, "total_batch_size": 6, "max_steps": 1, "epochs": 100, "eval_split": 0, "loggers": "none"}


def play(inventory: Path, *words: str) -> str:
    """Run ansible-playbook; return its output. Exits if it fails."""
    return run_program("ansible-playbook", "-i", str(inventory), *words)


def run_program(name: str, *words: str) -> str:
    """Run a program of this environment; return its output. Exits if it fails."""
    command = [str(Path(sys.executable).with_name(name)), *words]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def variables(run: str, dataset: Path) -> list[str]:
    values = SPEC | {"run": run, "dataset": dataset}
    return [word for name, value in values.items() for word in ("-e", f"{name}={value}")]


def first_step(lab: Lab, run: str) -> float:
    """Wait for step 1, whose gradients are the first large all-reduce; return its time of record (s since the epoch)."""
    file = f"{DATA}/runs/{run}/metrics.jsonl"
    lab.wait(lambda: bool(lab.inside(lab.hosts[0], f"cat {file}", check=False).strip()), "no step was recorded", 300)
    return float(lab.inside(lab.hosts[0], f"stat -c %.9Y {file}"))


def by_hand(lab: Lab, inventory: Path, run: str, dataset: Path, folder: Path) -> float:
    """Return the seconds to the first all-reduce when the rendered commands are sent over SSH."""
    scripts = folder / run
    play(inventory, "train.yml", *variables(run, dataset), "-e", "render_only=true", "-e", f"render_to={scripts}")
    for host in lab.hosts:  # open the connection first, as ControlPersist does for the playbook
        subprocess.run([*lab.ssh(host), "true"], check=True, capture_output=True)
    start = time.time()
    shells = []
    for host in lab.hosts:
        with (scripts / f"{host.name}.sh").open() as script:
            shells.append(subprocess.Popen([*lab.ssh(host), "bash -s"], stdin=script, stdout=subprocess.DEVNULL))
    seconds = first_step(lab, run) - start
    for shell in shells:
        shell.wait()
    return seconds


def by_controller(
    lab: Lab, inventory: Path, run: str, dataset: Path, *, playbook: bool = True
) -> tuple[float, float, float]:
    """Start a run with train.yml, or with `trainyard train`.

    Returns:
        The seconds from the command to the first all-reduce, those from the start of torchrun to it, and those between the
        first and the last start of torchrun.
    """
    start = time.time()
    words = variables(run, dataset)
    if playbook:
        play(inventory, "train.yml", *words)
    else:
        run_program("trainyard", "train", "-i", str(inventory), *words)
    starts = [json.loads(lab.inside(host, f"cat {DATA}/runs/{run}/state/node.json"))["started"] for host in lab.hosts]
    first = first_step(lab, run)
    return first - start, first - min(starts), max(starts) - min(starts)


def skew(lab: Lab, inventory: Path, folder: Path, run: str) -> float:
    """Return the seconds between the first and the last start of a sleeping process on all hosts."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("trainer/__init__.py", "")
        for source in sorted((TOP / "trainer/supervise").glob("*.py")):
            content.write(source, f"trainer/supervise/{source.name}")
    (folder / "trainer.zip").write_bytes(archive.getvalue())
    run_dir = f"{DATA}/runs/{run}"

    def entry(rank: int, host: LabHost) -> dict[str, Any]:
        command = ["/bin/sleep", "3"]
        return {"host": host.name, "node_rank": rank, "ranks": [rank], "run_dir": run_dir, "command": command}

    plan = [entry(rank, host) for rank, host in enumerate(lab.hosts)]
    launch = {"command": "train", "step": "launch", "session": {"plan": plan}}
    tasks = [
        {"name": "Folder", "ansible.builtin.file": {"path": run_dir, "state": "directory", "mode": "0755"}},
        {
            "name": "Trainer",
            "ansible.builtin.copy": {"src": str(folder / "trainer.zip"), "dest": f"{run_dir}/", "mode": "0644"},
        },
        {"name": "Start", "trainyard": launch, "run_once": True},
    ]
    book = folder / "skew.yml"
    book.write_text(yaml.safe_dump([{"name": "Skew", "hosts": "cluster", "gather_facts": False, "tasks": tasks}]))
    play(inventory, str(book))
    starts = [json.loads(lab.inside(host, f"cat {run_dir}/state/node.json"))["started"] for host in lab.hosts]
    return max(starts) - min(starts)


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many", type=int, default=20)
    a = parser.parse_args()
    lab = Lab(f"bench-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            dataset = folder / "questions.jsonl"
            rows = [{"instruction": f"What follows {n}?", "output": f"After {n} comes {n + 1}."} for n in range(60)]
            dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
            lab.up(hosts=3, venv=Path(sys.prefix), persistent=False)
            play(lab.inventory, "site.yml", "--tags", "storage")
            by_controller(lab, lab.inventory, "warm", dataset)
            by_hand_seconds, playbook_seconds, program_seconds, after_launch, skews = [], [], [], [], []
            for place in range(a.rounds):
                by_hand_seconds.append(by_hand(lab, lab.inventory, f"hand{place}", dataset, folder))
                seconds, after, apart = by_controller(lab, lab.inventory, f"book{place}", dataset)
                playbook_seconds.append(seconds)
                program = by_controller(lab, lab.inventory, f"program{place}", dataset, playbook=False)[0]
                program_seconds.append(program)
                after_launch.append(after)
                skews.append(apart)
                print(
                    f"by hand {by_hand_seconds[-1]:.1f} s, train.yml {seconds:.1f} s ({after:.1f} s from the launch), trainyard train {program:.1f} s, starts {apart:.2f} s apart; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
            more, program_more = (
                statistics.median(seconds - manual for seconds, manual in zip(found, by_hand_seconds, strict=True))
                for found in (playbook_seconds, program_seconds)
            )
            print(
                f"3 hosts, median of {a.rounds}: by hand {statistics.median(by_hand_seconds):.1f} s, train.yml {statistics.median(playbook_seconds):.1f} s, "
                f"difference {more:.1f} s (goal 1, limit 8), "
                f"trainyard train {statistics.median(program_seconds):.1f} s, difference {program_more:.1f} s; {statistics.median(after_launch):.1f} s from the launch; starts at most {max(skews):.2f} s apart (limit 0.5)"
            )
            if a.many:
                lab.up(hosts=a.many, venv=Path(sys.prefix), persistent=False)
                apart_many = [skew(lab, lab.inventory, folder, f"skew{place}") for place in range(3)]
                print(f"{a.many} hosts: starts {', '.join(f'{s:.2f}' for s in apart_many)} s apart (limit 2)")
    finally:
        lab.down()


if __name__ == "__main__":
    main()
