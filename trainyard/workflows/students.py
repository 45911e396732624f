"""Train several students on one dataset, each as a run of its own: at once on disjoint hosts, else one after another."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import counted, printable, table
from trainer.config import RunSpec
from trainer.distributed.worker_process import die_with_launcher
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.nodes import PORTS
from trainyard.run.session import RunSession
from trainyard.run.types import Report
from trainyard.wire.connection import Host, HostConnection, InventoryError
from trainyard.wire.run_errors import RunError

Connect = Callable[[Host], HostConnection]


@dataclass
class StudentRun:
    """One student and its outcome."""

    spec: RunSpec  # its run spec; the model is as the user named it
    run: str  # name of the run
    hosts: list[str]  # hosts on which it trains
    result: dict[str, Any] = field(default_factory=dict)  # result of the run; empty if it failed
    error: str = ""  # why it failed; empty if it did not


def host_groups(hosts: Sequence[Host], students: int, hybrid: bool) -> list[list[Host]]:
    """Return disjoint groups of hosts, each of which trains one student at a time.

    Args:
        students: their number; there are never more groups.
        hybrid: at least two hosts for a student where the hosts suffice; otherwise one host for each.
    """
    count = max(1, min(students, len(hosts) // (2 if hybrid else 1)))
    if not hybrid:
        return [[host] for host in hosts[:count]]
    bounds = [len(hosts) * part // count for part in range(count + 1)]
    return [list(hosts[start:end]) for start, end in itertools.pairwise(bounds)]


def train_students(
    specs: Sequence[RunSpec],
    hosts: Sequence[Host],
    connect: Connect,
    options: LaunchOptions,
    *,
    hybrid: bool = False,
    home: Path,
    report: Report = print,
) -> list[StudentRun]:
    """Train every student; one that fails does not end the others.

    `connect`: makes the connection to a host. It is called in the main thread of a process. `hybrid`: see
    `host_groups`. `home`: as for RunSession. Raises UserError: a spec is invalid, before any host is contacted.
    """
    groups = host_groups(hosts, len(specs), hybrid)
    settings = _options_of(groups, options)
    sessions = []
    for index, spec in enumerate(specs):
        session = RunSession(groups[index % len(groups)], connect, options, spec=spec, home=home, report=report)
        session.prepare()
        sessions.append(session)
    runs = [
        StudentRun(spec, session.run_name, [host.name for host in groups[index % len(groups)]])
        for index, (spec, session) in enumerate(zip(specs, sessions, strict=True))
    ]
    if len({run.run for run in runs}) < len(runs):
        raise UserError("distill: two students have the same run spec: name each model once")
    jobs = [
        [(index, sessions[index].state) for index in range(group, len(specs), len(groups))]
        for group in range(len(groups))
    ]

    def train(group: int, tell: Callable[[tuple[Any, ...]], None]) -> None:
        for index, state in jobs[group]:
            prefix = f"{runs[index].run}: " if len(specs) > 1 else ""
            how: dict[str, Any] = {"home": home, "state": state}
            how["report"] = lambda line, prefix=prefix: tell(("line", prefix + line))
            session = RunSession(groups[group], connect, settings[group], **how)
            try:
                if result := session.run().get("result"):
                    tell(("result", index, result))
                else:
                    tell(("error", index, "the run was stopped"))
            except (RunError, UserError, InventoryError) as error:
                tell(("error", index, str(error)))

    def hear(message: tuple[Any, ...]) -> None:
        if message[0] == "line":
            report(message[1])
        elif message[0] == "result":
            runs[message[1]].result = message[2]
        else:
            runs[message[1]].error = message[2]
            report(f"{runs[message[1]].run} failed: {message[2]}")

    if len(groups) == 1:
        train(0, hear)
    else:
        _in_processes(len(groups), train, hear)
    for run in runs:
        if not run.result and not run.error:
            run.error = "its process on the controller ended"
    return runs


def _options_of(groups: Sequence[Sequence[Host]], options: LaunchOptions) -> list[LaunchOptions]:
    """Return the launch options of every group: with its own head, and its own port where groups share a machine."""
    heads = [group[0].address for group in groups]
    shared = len(set(heads)) < len(heads) and options.master_port is None
    ports: list[int | None] = list(_free_ports(len(groups))) if shared else [options.master_port] * len(groups)
    found = []
    for group, port in zip(groups, ports, strict=True):
        head = options.head if options.head in {host.name for host in group} else ""
        change = {"master_port": port, "head": head, "min_nodes": min(options.min_nodes, len(group))}
        found.append(options.model_copy(update=change))
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports that are free on this machine, drawn at random because other runs may start now. Raises UserError."""
    free: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise UserError(
        f"distill: fewer than {count} ports from {PORTS.start} to {PORTS.stop - 1} are free: stop other runs"
    )


def _in_processes(
    count: int, work: Callable[[int, Callable[[tuple[Any, ...]], None]], None], hear: Callable[[tuple[Any, ...]], None]
) -> None:
    """Call `work(index, tell)` in `count` processes at once; in this process, `hear` receives what they pass to `tell`.

    A session makes its connections in the main thread of its process, so that a thread does not suffice.
    """
    context = multiprocessing.get_context("fork")
    processes = []
    receivers: list[Connection] = []

    def child(index: int, sender: Connection) -> None:
        die_with_launcher()
        try:
            work(index, sender.send)
        except BaseException:
            sender.send(("line", printable(traceback.format_exc().strip().splitlines()[-1])))
        finally:
            sender.close()
            os._exit(0)  # threads of hosts that do not answer must not keep the process

    try:
        for index in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(index, sender))
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        while receivers:
            for ready in wait(receivers):
                assert isinstance(ready, Connection)
                try:
                    hear(ready.recv())
                except EOFError:
                    receivers.remove(ready)
    finally:
        for process in processes:
            if process.is_alive():
                process.join(0.5)
            process.kill()
            process.join()


def student_table(runs: Sequence[StudentRun]) -> list[str]:
    """Return the result: the held-out loss on the teacher's text of every student, beside that of its untrained base."""
    rows = [["student", "run", "seed", "learned from", "hosts", "untrained", "trained", "change", "result"]]
    for run in runs:
        before, after = run.result.get("eval_loss_first"), run.result.get("eval_loss")
        change = f"{(after / before - 1) * 100:+.0f} %" if before and after is not None else ""
        where = str(run.result.get("adapter") or run.result.get("model") or "")
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (before, after)]
        ended = f"failed: {run.error}" if run.error else where
        spec, hosts = run.spec, ",".join(run.hosts)
        count = run.result.get("train_samples")
        learned = (spec.data_part or "all") + ("" if count is None else f": {counted(count, 'sample')}")
        shown = [printable(spec.model, 60), run.run, str(spec.seed), learned, hosts]
        rows.append([*shown, *losses, change, printable(ended)])
    return ["held-out loss per token on the teacher's answers:", *(f"  {line}" for line in table(rows))]
