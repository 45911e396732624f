"""The queue: time to a start, preemption, order, a lost host, random events, leased time.

    sudo make bench NAME=queued_runs [ARGS='preempt lost']
    sudo make bench NAME=queued_runs ARGS='events --events 50 --seed 1'

Starts a lab of three hosts with Slurm and two stand-in GPUs each. Without a name of a section, it runs all of them. `--lab NAME` takes
a lab that a call with `--keep` has left. Requires root on Debian or Ubuntu. Takes about 40 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from fault_trial import Trial, questions
from lab_hosts import Host, Lab, inventory_with
from queue_events import EventTrial
from queued_runs import COUNTING, QueuedRun, QueueLab, tiny_spec
from testbed import faults
from testbed.machine import LabError
from testbed.root import DATA_DIR, USER

from benchmarks.start import play
from trainer.formats import counted
from trainyard.queue.request import Request, slurm_options
from trainyard.queue.slurm import PRIORITIES
from trainyard.tables import table

WRAP = ("--chdir=/", "--output=/dev/null", "--wrap")
GPUS = {"node1": 2, "node2": 2, "node3": 2}
Rows = list[tuple[str, str, str]]  # what, measured, bound


def slurm(queue: QueueLab, *words: str) -> str:
    """Return the answer of a command of Slurm on the queue host, as the user of the hosts."""
    return queue.lab.inside(queue.lab.hosts[0], f"cd /; runuser -u {USER} -- {shlex.join(words)}").strip()


def until(condition: Callable[[], Any], what: str, limit: float = 120.0) -> float:
    """Wait until a condition holds; return the time. Raises AssertionError."""
    deadline = time.monotonic() + limit
    while True:
        with suppress(LabError, json.JSONDecodeError):
            if condition():
                return time.time()
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} within {limit:.0f} s")
        time.sleep(0.05)


def spread(values: list[float]) -> str:
    """Return the median of some seconds with the least and the largest."""
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def load() -> str:
    """Return the load of this machine, as the end of a line."""
    return f"; load {os.getloadavg()[0]:.1f}"


class Bench:
    """The sections. Each returns its rows of the table."""

    def __init__(self, queue: QueueLab, options: argparse.Namespace) -> None:
        """Take a lab with the queue; names of runs begin with the time, so that a lab can be used again."""
        self.queue, self.lab, self.options = queue, queue.lab, options
        self.tag = f"b{int(time.time())}"

    def start(self) -> Rows:
        """Compare `queue.yml do=add` with train.yml: seconds from the command to the start of the last rank."""
        inventory = inventory_with(
            self.lab, self.queue.folder / "start", queue_state="present", cluster_gpus=[], cluster_python=COUNTING
        )
        rows = []
        for hosts in (1, 3):
            by_train, by_queue = [], []
            for number in range(self.options.rounds):
                names = f"{self.tag}-train{hosts}-{number}", f"{self.tag}-add{hosts}-{number}"
                limit = ["--limit", "node1"] if hosts == 1 else []
                by_train.append(self.ranks_started(names[0], inventory, "train.yml", *limit))
                extra = ["-e", "do=add", "-e", f"nodes={hosts}", *limit]
                by_queue.append(self.ranks_started(names[1], inventory, "playbooks/queue.yml", *extra))
            pairs = zip(by_queue, by_train, strict=True)
            later = [added - trained for added, trained in pairs]
            what = f"ranks of {counted(hosts, 'host')} started: train.yml {spread(by_train)}, add {spread(by_queue)}; difference"
            rows.append((what, spread(later), "6 s"))
        return rows

    def ranks_started(self, run: str, inventory: Path, playbook: str, *words: str) -> float:
        """Run a playbook; return the seconds from its start to the start of the last rank."""
        values = tiny_spec(run, questions(self.queue.folder), 20) | {"loggers": "none"}
        variables = [word for name, value in values.items() for word in ("-e", f"{name}={value}")]
        begun = time.time()
        play(inventory, playbook, *variables, *words)
        finished = f"cat {DATA_DIR}/runs/{run}/result.json"
        head = self.lab.hosts[0]
        until(lambda: self.lab.inside(head, finished, check=False), f"{run} does not finish")
        started = []
        for host in self.lab.hosts:
            if text := self.lab.inside(host, f"cat {DATA_DIR}/runs/{run}/state/node.json 2>/dev/null || :"):
                started.append(json.loads(text)["started"])
        until(self.idle, "the hosts do not become idle")
        return max(started) - begun

    def idle(self) -> bool:
        """Return whether no job has a host."""
        return set(slurm(self.queue, "sinfo", "--noheader", "--Node", "--format=%T").split()) == {"idle"}

    def preempt(self) -> Rows:
        """Let a critical run take the host of a low one, which resumes by itself. Real training."""
        straight = self.queue.add(f"{self.tag}-straight", 60, hosts=["node1"], cores=2)
        saved, held, losses, wrong = [], [], [], []
        for number in range(self.options.rounds):
            low = self.queue.add(f"{self.tag}-low{number}", 60, priority="low", hosts=["node2", "node3"], cores=2)
            first = low.wait_step(3, 300)
            name = f"{self.tag}-critical{number}"
            critical = self.queue.add(name, 2, priority="critical", hosts=[first.name], cores=2)
            submitted = time.time()
            critical.wait(lambda state: bool(state["attempts"]), "running", 60)
            held.append(critical.state()["attempts"][0]["begin"] - submitted)
            newest = f"cd {low.run_dir}/checkpoints && stat -c %.3Y $(ls -d step-* | tail -n 1)/manifest.json"
            saved.append(float(self.lab.inside(first, newest)) - submitted)
            low.wait_phase("finished", 400)
            critical.wait_phase("finished", 300)
            straight.wait_phase("finished", 400)
            print(
                f"critical has its host after {held[-1]:.1f} s, checkpoint after {saved[-1]:.1f} s{load()}", flush=True
            )
            assert [attempt["order"] for attempt in low.state()["attempts"]] == [75, 10], low.log()
            expected = straight.result(straight.on()[0])["loss_last"]
            losses.append(abs(low.result(low.on()[0])["loss_last"] - expected))
            wrong += QueuedTrial(self.lab, self.queue.inventory, {"run": low.name}, queued=low).wrong_samples()
        return [
            ("critical over low: checkpoint of the low run after the submission", spread(saved), "10 s"),
            ("critical over low: the critical run has its host", spread(held), "10 s"),
            ("final loss of the preempted run, difference from an undisturbed one", f"{max(losses):.1e}", "1e-6"),
            ("samples lost or repeated", str(len(wrong)), "0"),
        ]

    def order(self) -> Rows:
        """Submit two jobs of each priority in 20 random orders to one host, with the options of queued runs."""
        good = sum(self.in_order(random.Random(seed), f"{self.tag}-order{seed}") for seed in range(20))
        return [("critical > high > normal > low, equal ones first come first", f"{good} of 20 shuffles", "20 of 20")]

    def in_order(self, chance: random.Random, name: str) -> bool:
        """Return whether jobs that wait for a host start in the right order."""
        wanted = [priority for priority in PRIORITIES for _ in range(2)]
        chance.shuffle(wanted)
        host, others = self.lab.hosts[2], ["node1", "node2"]
        blocker = slurm(
            self.queue, "sbatch", "--parsable", "-p", "critical", "-w", host.name, "--exclusive", *WRAP, "sleep 600"
        )
        running = lambda: slurm(self.queue, "squeue", "-h", "-j", blocker, "-o", "%T") == "RUNNING"  # noqa: E731
        until(running, "the first job does not start")
        for number, priority in enumerate(wanted):
            request = Request(run=f"{name}-{number}", priority=priority, hosts=(host.name,))
            words = ["sbatch", "--parsable", "--hold", *slurm_options(request, others), *WRAP]
            job = slurm(self.queue, *words, f"echo {number} >>{DATA_DIR}/{name}")
            slurm(self.queue, "scontrol", "release", job)
        slurm(self.queue, "scancel", blocker)
        until(lambda: not slurm(self.queue, "squeue", "-h", "-o", "%i"), "the jobs do not end")
        ran = [int(line) for line in self.lab.inside(host, f"cat {DATA_DIR}/{name}").split()]
        expected = sorted(range(len(wanted)), key=lambda number: (-PRIORITIES.index(wanted[number]), number))
        print(f"{name}: {'right' if ran == expected else f'ran {ran}, expected {expected} of {wanted}'}", flush=True)
        return ran == expected

    def lost(self) -> Rows:
        """Cut the power of the only host of a run."""
        seconds = []
        for number in range(self.options.rounds):
            run = self.queue.add(f"{self.tag}-lost{number}", 1200, hosts=["node2", "node3"], cores=2, counting=True)
            host = run.wait_step(6, 300)
            copied = f"ls {run.folder}/checkpoint 2>/dev/null || :"
            until(lambda copied=copied, run=run: "step-" in self.lab.inside(run.head, copied), "there is no copy")
            begun = time.time()
            faults.inject(self.lab, host, "crash")
            try:
                run.wait_step(1, 180, attempt=2)
                seconds.append(time.time() - begun)
                print(f"the run trains elsewhere after {seconds[-1]:.1f} s{load()}", flush=True)
                run.wait_phase("finished", 400)
            finally:
                faults.undo(self.lab, host, "crash")
            until(self.idle, "the hosts do not become idle")
            assert run.result(run.on()[0])["loss_last"] == sum(range(1201)), "steps were lost or repeated"
        return [("lost host: the run trains elsewhere", spread(seconds), "60 s")]

    def devices(self) -> Rows:
        """Put two runs with one GPU each on one host."""
        names = [f"{self.tag}-{name}" for name in ("one", "two")]
        runs = [self.queue.add(name, 400, gpus=1, hosts=["node2"], counting=True) for name in names]
        for run in runs:
            run.wait_step(5, 100)
        states = [json.loads(self.lab.inside(run.on()[0], f"cat {run.run_dir}/state/node.json")) for run in runs]
        assert [state["status"] for state in states] == ["running"] * 2, "they do not run at the same time"
        for run in runs:
            run.wait_phase("finished")
        found = [device for state in states for device in state["devices"]]
        return [("two runs with one GPU each on a host with two", " and ".join(found), "different")]

    def sweep(self) -> Rows:
        """Train a grid of 12 runs on 3 hosts, added with one file."""
        inventory = inventory_with(self.lab, self.queue.folder / "sweep", queue_state="present", cluster_gpus=[])
        name = f"{self.tag}-sweep"
        sweep = tiny_spec(name, questions(self.queue.folder), 150) | {"run_env": {"OMP_NUM_THREADS": "1"}}
        del sweep["lr"]
        sweep |= {"grid": {"lr": [1e-4, 2e-4, 3e-4, 4e-4], "seed": [1, 2, 3]}}
        file = self.queue.folder / "sweep.yml"
        file.write_text(yaml.safe_dump(sweep))
        play(inventory, "playbooks/queue.yml", "-e", "do=add", "-e", f"file={file}")
        until(self.idle, "the sweep does not end", 1800)
        shown = slurm(self.queue, "scontrol", "--oneliner", "show", "job").splitlines()
        jobs = [dict(word.partition("=")[::2] for word in line.split()) for line in shown]
        jobs = [job for job in jobs if job["JobName"].startswith(name)]
        assert len(jobs) == 12 and {job["JobState"] for job in jobs} == {"COMPLETED"}, jobs
        spans = [[datetime.fromisoformat(job[key]).timestamp() for key in ("StartTime", "EndTime")] for job in jobs]
        whole = 3 * (max(end for _, end in spans) - min(begin for begin, _ in spans))
        leased = sum(end - begin for begin, end in spans) / whole
        mean = statistics.mean(end - begin for begin, end in spans)
        return [(f"sweep of 12 runs of {mean:.0f} s on 3 hosts: host time leased", f"{100 * leased:.1f} %", "90 %")]

    def events(self) -> Rows:
        """Let random events happen while runs are in the queue."""
        trial, begun = EventTrial(self.queue, self.options.seed), time.time()
        trial.inject(self.options.events)
        trial.wait()
        wrong = trial.problems()
        for line in wrong:
            print(line, flush=True)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in trial.events.items())
        print(f"{kinds}; {trial.attempts()} attempts of {len(trial.runs)} runs in {time.time() - begun:.0f} s{load()}")
        overlaps = sum(" got " in line for line in wrong)
        left = sum(line.endswith(" is left") for line in wrong)
        return [
            (f"{self.options.events} random events: runs that ended as they should", f"{len(trial.runs) - len(wrong) + overlaps + left} of {len(trial.runs)}", "all"),
            ("two runs on one GPU", str(overlaps), "0"),
            ("processes left", str(left), "0"),
        ]  # fmt: skip


@dataclass
class QueuedTrial(Trial):
    """A queued run, for the comparison of its samples with their order."""

    queued: QueuedRun | None = None

    def run_hosts(self) -> list[Host]:
        """Return the hosts of the newest attempt."""
        assert self.queued
        return self.queued.on()


SECTIONS = ("start", "devices", "preempt", "lost", "order", "sweep", "events")


def main() -> None:
    """Run the sections, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"default: all of {' '.join(SECTIONS)}")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of start, preempt and lost")
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the random events")
    parser.add_argument("--lab", default="", help="a lab that --keep has left")
    parser.add_argument("--keep", action="store_true", help="leave the lab: make lab-down NAME=... removes it")
    a = parser.parse_args()
    if unknown := [name for name in a.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}: use {', '.join(SECTIONS)}")
    name = a.lab or f"bench-{os.getpid()}"
    rows: Rows = []
    try:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            queue = QueueLab.of(Lab(name), folder) if a.lab else QueueLab.start(name, folder, GPUS, persistent=a.keep)
            bench = Bench(queue, a)
            for section in a.sections or SECTIONS:
                begun = time.time()
                rows += getattr(bench, section)()
                print(f"{section}: {time.time() - begun:.0f} s{load()}", flush=True)
    finally:
        print("\n".join(table([("what", "measured", "bound"), *rows])))
        if not (a.keep or a.lab):
            Lab(name).down()


if __name__ == "__main__":
    main()
