"""Start, follow, stop a run on all hosts of a play at once. Documented in plugins/modules/ranks.py.

One task talks to all hosts, from a thread each, over each host's own connection (ssh with its ControlPersist, local), so
that neither `forks` nor the order of the hosts matters. A question is one command: a verb of the remote archive
(`run_status`, `run_stop`), or the staged trainer (`start`, which must outlive us).
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.utils.display import Display

from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure
from trainyard.connection import FanOut, HostConnection
from trainyard.run.monitor import (
    ENDED,
    STATUS_HEAD,
    Cause,
    Part,
    Progress,
    causes,
    killed_ranks,
    left_behind,
    others_go_on,
    status_rows,
    table,
)

display = Display()

TICK = 0.1  # s between two looks at what the hosts have answered
POLL = 0.5  # s between two questions to a host, at least
CALM = 3.0  # s that a host keeps a question if there is no news: fewer questions, and news at once
START_LIMIT = 60.0  # s for a host to get ready
GO_LIMIT = 20.0  # s for a host to hear that it begins
STOP_LIMIT = 30.0  # s for a host to answer to stop, above the grace
LATE = 10.0  # s after the head's end that other replicas have to come to the last step
DOUBT = 1.5  # s to wait for the real cause when only its consequences have been seen
TAIL = 20  # lines of a log shown with a failure


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        self.hostvars = variables["hostvars"]
        self.connect = cluster_connections(self, variables)
        self.play_hosts = list(variables["ansible_play_hosts"])
        _, self.a = self.validate_argument_spec(
            {
                "state": {"choices": ["started", "followed", "stopped", "status"], "required": True},
                "run": {"type": "str"},
                "plan": {"type": "list", "elements": "dict"},
                "backend": {"choices": ["auto", "systemd", "process"]},
                "properties": {"type": "list", "elements": "str", "default": []},
                "attempt": {"type": "int"},
                "interval": {"type": "float", "default": 2.0},
                "stall_limit": {"type": "float", "default": 600.0},
                "lost_limit": {"type": "float", "default": 10.0},
                "grace": {"type": "float", "default": 60.0},
                "now": {"type": "bool", "default": False},
                "wanted": {"type": "bool", "default": True},
            }
        )
        if self.a["state"] != "status" and not self.a["plan"] and not self.a["run"]:
            return failure("name the run: -e run=NAME")
        return getattr(self, self.a["state"])()

    # What each state does ---------------------------------------------------------------------------------------------

    def started(self) -> dict[str, Any]:
        plan = self.a["plan"]
        if not plan:
            return failure("a run is started by its plan")
        names = ", ".join(entry["host"] for entry in plan)
        if self._task.check_mode:
            return {"changed": True, "msg": f"would start {self.run_name()} on {names}"}
        if stale := [Part(entry["host"], entry["run_dir"]) for entry in plan if entry.get("stale")]:
            for host, word in self.stop_all(stale, {"now": True}, STOP_LIMIT).items():
                return failure(
                    f"{host}: what is left there of an earlier start cannot be stopped: {word}", try_again=True
                )
        links = self.links([entry["host"] for entry in plan])
        # First every host gets ready, which takes some of them longer; then a command of a few milliseconds starts all.
        ready = FanOut({e["host"]: self.starter(links[e["host"]], e, plan) for e in plan}).wait(START_LIMIT)
        said = ready if ready.errors else FanOut({e["host"]: goer(links[e["host"]], e) for e in plan}).wait(GO_LIMIT)
        if said.errors:
            # Who refused may have another run there, or this one, from another start: that is not ours to stop.
            parts = [Part(entry["host"], entry["run_dir"]) for entry in plan if entry["host"] in ready.answers]
            self.stop_all(parts, {"now": True}, STOP_LIMIT)
            host, word = next((e["host"], said.errors[e["host"]]) for e in plan if e["host"] in said.errors)
            return failure(f"{host}: {word}", troubles=said.errors, try_again=True)
        for entry in plan:
            if settings := ready.answers[entry["host"]].get("ignored"):
                say(f"{entry['host']}: {', '.join(settings)} is not held there, for there is no systemd to hold it")
        times = [answer["now"] for answer in said.answers.values()]
        return {"changed": True, "hosts": ready.answers, "skew_seconds": round(max(times) - min(times), 3)}

    def starter(
        self, link: HostConnection, entry: dict[str, Any], plan: list[dict[str, Any]]
    ) -> Callable[[], dict[str, Any]]:
        request: dict[str, Any] = {
            "run_dir": entry["run_dir"],
            "node_rank": entry["node_rank"],
            "ranks": entry["ranks"],
            "hosts": [other["host"] for other in plan],
            "backend": self.a["backend"] or entry.get("backend") or "auto",
            "attempt": self.a["attempt"] or entry.get("attempt"),
            "properties": [*self.a["properties"], *(entry.get("properties") or [])],
            "hold": True,
            "command": [str(word) for word in entry["command"]],
        }
        if entry.get("replica") is not None:
            request |= {name: entry[name] for name in ("replica", "restarts", "lighthouse")}
        return lambda: link.start_run(request)

    def followed(self) -> dict[str, Any]:
        if self._task.check_mode:
            return {"skipped": True, "msg": "nothing runs in check mode"}
        parts, missing = self.parts()
        if not parts:
            return failure(f"no host has a run {self.run_name()}; playbooks/status.yml lists the runs")
        if missing and parts[0].node_rank == 0 and parts[0].replica is not None:
            parts, missing = self.with_the_away(parts), {}
        if missing:
            host, word = next(iter(missing.items()))
            return failure(f"{host} does not answer ({word}), so the run cannot be followed")
        world_size = sum(len(part.ranks) for part in parts)
        run = self.run_name()
        say(f"following {run}: {world_size} ranks on {', '.join(part.host for part in parts)}")
        say(
            f"Ctrl-C leaves it running; again: playbooks/attach.yml -e run={run}; stop: playbooks/stop.yml -e run={run}"
        )
        follower = Follower(parts, self.links([p.host for p in parts]), Progress(world_size, **self.limits()), self.a)
        cause = follower.follow()
        if cause is None:
            for host, word in self.stop_all(follower.left_out(), {"now": True}, STOP_LIMIT).items():
                say(f"could not stop {host}, which was away at the end: {word}")
            ended = {"changed": True, "hosts": self.ends(parts)}
            if all(part.status != "stopped" for part in parts):
                return ended | {"status": "finished"}
            step = max((state.get("step", 0) for part in parts for state in part.states.values()), default=0)
            word = f"run {run} was stopped after step {step}: train.yml with the same spec goes on from there"
            return ended | {"status": "stopped", "lines": [word]}
        # Who is half way to being lost when another is found so does not count as there: a switch takes several.
        limit = self.a["lost_limit"] / 2
        lost = [part.host for part in parts if part.silent > limit and part.status not in ENDED]
        unstopped = self.stop_all([part for part in parts if part.host not in lost], {"now": True}, STOP_LIMIT)
        lines = [*self.evidence(parts, cause), *(f"could not stop {h}: {w}" for h, w in unstopped.items())]
        named = {"host": cause.host, "rank": cause.rank if cause.rank >= 0 else None}
        named |= {"kind": cause.kind, "mend": cause.mend}
        wanted = any((part.answer or {}).get("stop_wanted") for part in parts)
        return failure(cause.text, lines=lines, cause=named, lost=lost, stop_wanted=wanted, hosts=self.ends(parts))

    def stopped(self) -> dict[str, Any]:
        parts, missing = self.parts(left=True)
        if not parts and not missing:
            return failure(f"no host has a run {self.run_name()}; playbooks/status.yml lists the runs")
        names = ", ".join(part.host for part in parts)
        if self._task.check_mode:
            return {"changed": True, "msg": f"would stop {self.run_name()} on {names}"}
        if self.a["plan"]:
            self.ask_all(parts)
        alive = any((part.answer or {}).get("alive") for part in parts)
        how = {"now": self.a["now"], "grace": self.a["grace"], "wanted": self.a["wanted"]}
        missing |= self.stop_all(
            parts,
            how,
            STOP_LIMIT + (0 if self.a["now"] else self.a["grace"]),
        )
        if missing:
            host, word = next(iter(missing.items()))
            return failure(f"{host} could not be told to stop: {word}", troubles=missing)
        self.ask_all(parts)
        ends = {part.host: part.status for part in parts}
        word = ", ".join(f"{host} {status}" for host, status in ends.items())
        lines = [f"run {self.run_name()}: {word}" + ("" if alive else " (it was not running)")]
        killed = ", ".join(str(rank) for rank in sorted(rank for part in parts for rank in killed_ranks(part)))
        if alive and killed and not self.a["now"]:
            lines.append(
                f"killed, since a checkpoint took them longer than {self.a['grace']:g} s: ranks {killed}; the run goes on "
                "from the one before (-e grace=SECONDS gives them longer)"
            )
        return {"changed": alive, "hosts": ends, "lines": lines}

    def status(self) -> dict[str, Any]:
        links = self.links(self.play_hosts)
        asked = FanOut({host: self.lister(link) for host, link in links.items()}).wait(self.a["lost_limit"])
        runs = [
            {"host": host, **answer}
            for host in self.play_hosts
            for answer in asked.answers.get(host, {}).get("runs", [])
            if self.a["run"] in (None, (answer.get("node") or {}).get("run"))
        ]
        rows = [row for answer in runs for row in status_rows(answer["host"], answer)]
        rows.sort(key=lambda row: row[0])
        rows += [
            ["-", host, "-", "unreachable", *["-"] * (len(STATUS_HEAD) - 4)]
            for host in self.play_hosts
            if host in asked.errors
        ]
        lines = table([STATUS_HEAD, *rows])
        if not runs:
            lines.append(f"no host has a run {self.a['run']}" if self.a["run"] else "no host has a run yet")
        return {"changed": False, "runs": runs, "troubles": asked.errors, "lines": lines}

    def lister(self, link: HostConnection) -> Callable[[], dict[str, Any]]:
        return lambda: link.call("run_list", {"data_dir": link.host.data_dir})

    # What they share --------------------------------------------------------------------------------------------------

    def run_name(self) -> str:
        return self.a["run"] or Path(self.a["plan"][0]["run_dir"]).name

    def limits(self) -> dict[str, float]:
        return {"interval": self.a["interval"], "stall_limit": self.a["stall_limit"]}

    def links(self, hosts: list[str]) -> dict[str, HostConnection]:
        return {host: self.connect(host) for host in hosts}

    def parts(self, left: bool = False) -> tuple[list[Part], dict[str, str]]:
        """The hosts' parts of the run by node rank: as planned, else as the hosts tell; and who should tell but does not.

        `left`: with what still runs of earlier starts, on hosts that the others had to go on without.
        """
        if self.a["plan"]:
            planned = self.a["plan"]
            parts = [Part(e["host"], e["run_dir"], e["node_rank"], list(e["ranks"])) for e in planned]
            for part, entry in zip(parts, planned, strict=True):
                part.replica = entry.get("replica")
            return parts, {}
        data = {host: self.hostvars[host]["cluster_data_dir"] for host in self.play_hosts}
        parts = [Part(host, f"{folder}/runs/{self.a['run']}") for host, folder in data.items()]
        troubles = self.ask_all(parts)
        known = [part for part in parts if part.node]
        # Two hosts that lost each other may have counted to the same number, each for itself.
        newest = max((part.node for part in known), key=lambda n: (n["attempt"], n["started"]), default={})
        found = [
            part
            for part in known
            if (part.node["attempt"] == newest["attempt"] and part.host in newest["hosts"])
            or (left and (part.answer or {}).get("alive"))
        ]
        for part in found:
            part.node_rank, part.ranks = part.node["node_rank"], part.node["ranks"]
            part.replica = part.node.get("replica")
        members = {host for part in found for host in part.node.get("hosts", [])}
        missing = {host: word for host, word in troubles.items() if host in members or not found}
        return sorted(found, key=lambda part: part.node_rank), missing

    def with_the_away(self, parts: list[Part]) -> list[Part]:
        """The parts and, by the plan that the head keeps, those whose replica is away just now."""
        link = self.connect(parts[0].host)
        answer = link.call("read_files", {"folder": parts[0].run_dir, "text": ["plan.json"]})
        kept = json.loads(answer["text"]["plan.json"])
        there = {part.host: part for part in parts}
        for entry in kept:
            part = Part(entry["host"], entry["run_dir"], entry["node_rank"], entry["ranks"], replica=entry["replica"])
            there.setdefault(entry["host"], part)
        return sorted(there.values(), key=lambda part: part.node_rank)

    def ask_all(self, parts: list[Part]) -> dict[str, str]:
        links = self.links([part.host for part in parts])
        asked = FanOut({p.host: asker(links[p.host], p) for p in parts}).wait(self.a["lost_limit"])
        for part in parts:
            part.answer = asked.answers.get(part.host, part.answer)
        return asked.errors

    def stop_all(self, parts: list[Part], how: dict[str, Any], limit: float) -> dict[str, str]:
        """Stop on all hosts at once; the hosts where that failed."""
        links = self.links([part.host for part in parts])  # of their own: a poll may still hang on the others
        return FanOut({p.host: stopper(links[p.host], p, how) for p in parts}).wait(limit).errors

    def ends(self, parts: list[Part]) -> dict[str, Any]:
        return {part.host: {"status": part.status, "node": part.node, "ranks": part.states} for part in parts}

    def evidence(self, parts: list[Part], cause: Cause) -> list[str]:
        """The failed rank's own traceback, the end of its log, and where the whole logs are; nothing of a lost host."""
        if cause.kind == "lost":
            return []
        part = next(part for part in parts if part.host == cause.host)
        state = part.states.get(cause.rank, {})
        error = state.get("error") or {}
        traceback = [] if error.get("plain") else str(error.get("traceback") or "").rstrip().splitlines()
        names = [f"torchrun.{part.node_rank}.log"]
        names[:0] = [f"rank{cause.rank}.log"] if cause.rank >= 0 else []
        link = self.connect(part.host)
        request = {"run_dir": part.run_dir, "logs_from": dict.fromkeys(names, -TAIL)}
        asked = FanOut({part.host: lambda: link.call("run_status", request)}).wait(3.0)
        logs = asked.answers.get(part.host, {}).get("logs", {})
        lines = [
            f"{name} on {part.host}: {logs.get(name, {}).get('path') or f'{part.run_dir}/logs/{name}'}"
            for name in names
        ]
        shown = next((name for name in names if logs.get(name, {}).get("lines")), None)
        tail = [f"last lines of {shown}:", *(f"  {line}" for line in logs[shown]["lines"])] if shown else []
        return [*traceback, *([] if error.get("plain") else tail), *lines]


class Follower:
    """Keeps a question open at every host until the run ended or broke.

    A host answers at once when something happened there, else after some seconds: watching costs little that way.
    """

    def __init__(
        self, parts: list[Part], links: dict[str, HostConnection], progress: Progress, a: dict[str, Any]
    ) -> None:
        self.parts, self.links, self.progress = parts, links, progress
        self.lost_limit: float = a["lost_limit"]
        self.patience = min(CALM, a["interval"], self.lost_limit / 3, a["stall_limit"] / 4)
        self.asked: dict[str, FanOut] = {}
        self.asked_at: dict[str, float] = {}
        self.heard = dict.fromkeys(links, time.monotonic())
        self.away: set[int] = set()  # replicas that the others go on without
        self.ended_at: float | None = None  # of the head

    def follow(self) -> Cause | None:
        """The cause once the run is broken, None once it has ended well."""
        doubt_since: float | None = None
        while True:
            self.poll(hasty=doubt_since is not None)
            now = time.monotonic()
            for line in self.progress.lines(self.parts, now):
                say(line)
            found = self.tolerated(causes(self.parts, self.lost_limit))
            if not found and (stall := self.progress.stalled(self.parts, now)):
                return stall
            if found:
                doubt_since = doubt_since or now
                # A host that is silent may be the cause of what the others complain about.
                silent = any(part.silent > DOUBT for part in self.parts if part.status not in ENDED)
                if found[0].sure or now - doubt_since > (self.lost_limit if silent else DOUBT):
                    return found[0]
            elif (out := self.left_out()) is not None and all(p.status in ENDED or p in out for p in self.parts):
                return None
            time.sleep(TICK)

    def tolerated(self, found: list[Cause]) -> list[Cause]:
        """Return the causes, or none if the run goes on without those whom they took away, which is said once."""
        away = others_go_on(self.parts, found) if any(part.replica is not None for part in self.parts) else set()
        for number in sorted(away - self.away):
            why = next(c.text for c in found if any(p.host == c.host and p.replica == number for p in self.parts))
            say(f"{why}: replica {number} is away, the others go on")
        for number in sorted(self.away - away if away or not found else ()):
            say(f"replica {number} is back")
        self.away = away
        return [] if away else found

    def left_out(self) -> list[Part]:
        """The parts that do not come to the end with the others: away, or far behind when the head had ended well."""
        if self.ended_at is None and self.parts[0].status == "finished":
            self.ended_at = time.monotonic()
        late = self.ended_at is not None and time.monotonic() - self.ended_at > LATE
        return [
            part
            for part in self.parts
            if part.replica is not None
            and part.status != "finished"
            and (part.replica in self.away or (late and left_behind(part)))
        ]

    def poll(self, hasty: bool) -> None:
        """Take up what was answered, and ask again who has answered. `hasty`: have the answers at once."""
        now = time.monotonic()
        for part in self.parts:
            asked = self.asked.get(part.host)
            if (asked is None or self.hear(part, asked)) and now - self.asked_at.get(part.host, 0) >= (
                TICK if hasty else POLL
            ):
                self.asked_at[part.host] = now
                patience = 0.0 if hasty else self.patience
                self.asked[part.host] = FanOut({part.host: asker(self.links[part.host], part, patience)})
            # A host that keeps the question is not silent: its answer is not due yet.
            part.silent = now - self.heard[part.host] - self.patience

    def hear(self, part: Part, asked: FanOut) -> bool:
        """Take up what the host said; whether it has said it."""
        if asked.threads[part.host].is_alive():
            return False
        if part.host in asked.answers:
            part.answer, part.trouble = asked.answers.pop(part.host), ""
            self.heard[part.host] = time.monotonic()
            if part.node.get("restarts"):  # torchrun numbers them anew when it starts them again
                part.ranks = part.node["ranks"]
        part.trouble = asked.errors.get(part.host, part.trouble)
        return True


def asker(link: HostConnection, part: Part, patience: float = 0.0) -> Callable[[], dict[str, Any]]:
    return lambda: link.call("run_status", {"run_dir": part.run_dir, "wait": patience})


def goer(link: HostConnection, entry: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    # No Python: the fewer milliseconds it takes, the closer together the ranks start.
    file = shlex.quote(f"{entry['run_dir']}/state/go")
    return lambda: link.run(f": >{file} && date '+{{\"now\": %s.%N}}'")


def stopper(link: HostConnection, part: Part, how: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: link.call("run_stop", {"run_dir": part.run_dir, **how})


def say(line: str) -> None:
    display.display(line)
