"""Random events while many runs are in the queue of lab hosts, and checks of the end. benchmarks/queued_runs.py and a nightly test use it."""

from __future__ import annotations

import random
import time

from lab_hosts import Host
from queued_runs import LEFT, QueuedRun, QueueLab
from testbed.machine import LabError
from testbed.root import DATA_DIR

from trainyard.remote.queue_phases import LIVE

# Targets of SIGKILL, by the command lines on a host. A pattern that is not anchored would match the shell that runs
# pgrep.
PROCESSES = {
    "rank": r"^[^ ]*/python /usr/local/bin/counting-python\.py ",
    "driver": r"^[^ ]*python[^ ]* -P -m trainyard\.queue\.driver ",
    "lease step": r"^/usr/bin/python3 .*trainyard\.queue\.lease_step ",
    "slurmctld": r"^/usr/sbin/slurmctld ",
    "slurmd": r"^/usr/sbin/slurmd ",
}
KINDS = ("preempt", *PROCESSES, "reboot")
PRIORITIES = ("low", "low", "low", "normal", "high")
LIVE_RUNS = 8  # for six GPUs
STEPS = 500  # 25 s of counting
CRITICAL_STEPS = 60
ANSWER_LIMIT = 90.0  # s for Slurm or a run to continue after an event


class EventTrial:
    """A queue that always has runs, and what happens to them.

    The ranks count instead of training (counting_rank.py): they show a lost or repeated step, and two runs on one GPU.

    Attributes:
        events: number of events so far, by kind.
        runs: all runs that were added.
    """

    def __init__(self, queue: QueueLab, seed: int) -> None:
        """Take the lab, whose hosts have two GPUs each; the seed chooses events, hosts and pauses."""
        self.queue, self.lab, self.random = queue, queue.lab, random.Random(seed)
        self.seed, self.runs = seed, list[QueuedRun]()
        self.events = dict.fromkeys(KINDS, 0)

    def inject(self, count: int) -> None:
        """Let this number of events happen, each 2 to 6 s after the one before it, while runs train."""
        for number in range(count):
            self.fill_queue()
            try:
                self.lab.wait(self.trains, "no run trains", ANSWER_LIMIT)
            except LabError as error:
                raise LabError(f"{error}\n{self.queue_state()}") from None
            time.sleep(self.random.uniform(2.0, 6.0))
            kinds = self.random.sample(KINDS, len(KINDS))
            kind, where = next((kind, where) for kind in kinds if (where := self.event(kind)))
            self.events[kind] += 1
            print(f"event {number + 1} of {count}: {kind}, {where}", flush=True)

    def event(self, kind: str) -> str:
        """Let one event happen; return where, or an empty string if there is nothing that it could hit."""
        hosts = self.random.sample(self.lab.hosts, len(self.lab.hosts))
        if kind == "reboot":
            self.lab.reboot(hosts[0])
            return hosts[0].name
        if kind == "preempt":
            low = [run for run in self.live() if "-low" in run.name]
            where = [host for run in low if run.state()["phase"] == "running" for host in run.on()]
            if not where:
                return ""
            host = self.random.choice(where)
            self.add("critical", CRITICAL_STEPS, cores=2, gpus=1, hosts=[host.name])
            return host.name
        for host in hosts:
            if pids := self.queue.pids(host, PROCESSES[kind]):
                pid = self.random.choice(pids)
                self.lab.inside(host, f"kill -9 {pid} || :")
                return f"{host.name}, process {pid}"
        return ""

    def fill_queue(self) -> None:
        """Add runs until LIVE_RUNS have not ended; every fourth one has two hosts."""
        ping = "scontrol ping 2>/dev/null || :"
        self.lab.wait(lambda: " UP" in self.lab.inside(self.lab.hosts[0], ping), "Slurm does not answer", ANSWER_LIMIT)
        for _ in range(LIVE_RUNS - len(self.live())):
            self.add(self.random.choice(PRIORITIES), STEPS, gpus=1, nodes=2 if len(self.runs) % 4 == 3 else 1)

    def add(self, priority: str, steps: int, **asked: object) -> None:
        """Add a run that counts."""
        name = f"event{self.seed}-{len(self.runs)}-{priority}"
        options = {"max_restarts": 1000}
        run = self.queue.add(name, steps, priority=priority, interval=20, counting=True, options=options, **asked)
        self.runs.append(run)

    def live(self) -> list[QueuedRun]:
        """Return the runs that have not ended."""
        return [run for run in self.runs if run.state()["phase"] in LIVE]

    def queue_state(self) -> str:
        """Return what Slurm and the drivers know of the runs that have not ended."""
        asked = "sinfo --Node --long; squeue --format='%i %j %T %r %S %N'"
        logs = [f"{run.name}: {run.state()}\n{run.log()[-600:]}" for run in self.live()]
        return "\n".join([self.lab.inside(self.lab.hosts[0], f"{asked} || :"), *logs])

    def trains(self) -> bool:
        """Return whether a host has ranks."""
        return any(self.queue.pids(host, PROCESSES["rank"]) for host in self.lab.hosts)

    def wait(self, limit: float = 600.0) -> None:
        """Wait until all runs have ended. Raises AssertionError with the log of one that has not."""
        deadline = time.monotonic() + limit
        while left := self.live():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{[run.name for run in left]} do not end\n{left[0].state()}\n{left[0].log()[-3000:]}"
                )
            time.sleep(1.0)

    def problems(self) -> list[str]:
        """Return the errors at the end, one line each."""
        found = []
        for run in self.runs:
            state = run.state()
            if state["phase"] != "finished":
                found.append(f"{run.name} is {state['phase']}: {(state['exit'] or {}).get('reason')}")
                continue
            steps = CRITICAL_STEPS if run.name.endswith("critical") else STEPS
            if (total := run.result(run.on()[0])["loss_last"]) != sum(range(steps + 1)):
                found.append(f"{run.name} lost or repeated steps: their sum is {total}")
        self.wait_idle()
        found += self.jobs_left()
        for host in self.lab.hosts:
            found += self.host_problems(host)
        return found

    def wait_idle(self) -> None:
        """Wait until every host is idle: Slurm releases the hosts of the last run after its end."""
        states = "sinfo --noheader --Node --format=%T | sort -u"
        idle = lambda: self.lab.inside(self.lab.hosts[0], states).strip() == "idle"  # noqa: E731
        self.lab.wait(idle, "not all hosts are idle", ANSWER_LIMIT)

    def jobs_left(self) -> list[str]:
        """Return the jobs that are left in the queue, one line each: all runs have ended, and others may wait for their jobs."""
        names = {run.name for run in self.runs}
        squeue = "squeue --noheader --format='%j|job %A is %T: %r'"

        def left() -> list[str]:
            rows = [line.partition("|") for line in self.lab.inside(self.lab.hosts[0], squeue).splitlines()]
            return [f"{name}: {said}, although the run has ended" for name, _, said in rows if name in names]

        deadline = time.monotonic() + ANSWER_LIMIT
        while (found := left()) and time.monotonic() < deadline:
            time.sleep(1.0)
        return found

    def host_problems(self, host: Host) -> list[str]:
        """Return the errors on a host: two runs had one GPU, or a process is left."""
        overlaps = self.lab.inside(host, f"cat {DATA_DIR}/store/cache/overlaps 2>/dev/null || :").splitlines()
        left = self.lab.inside(host, LEFT).split()
        return [f"{host.name}: {line}" for line in overlaps] + [f"{host.name}: {name} is left" for name in left]

    def attempts(self) -> int:
        """Return how often the runs had hosts."""
        return sum(len(run.state()["attempts"]) for run in self.runs)
