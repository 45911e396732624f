"""A run that a Python program has started, or finds on the hosts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainyard import front_end
from trainyard.api.results import Event, Metric, RunResult, pick
from trainyard.run.follow.artifacts import parse_result
from trainyard.run.follow.manage_runs import follow_run
from trainyard.run.follow.run_status import find_parts, no_such_run
from trainyard.run.host_run import HostRun
from trainyard.wire.replies import ReplyError, checked_reply, untrusted_json
from trainyard.wire.run_errors import RunError

if TYPE_CHECKING:
    from trainyard.api.cluster import Cluster
    from trainyard.commands.call import Call


class EventLog:
    """Turns lines and heartbeats into events; `None` is the end. Threads may share it."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._state: Mapping[str, Any] = {}

    def watch(self, state: Mapping[str, Any]) -> None:
        """Take a heartbeat of rank 0."""
        self._state = state

    def line(self, text: str) -> None:
        """Take a line."""
        self.events.put(pick(Event, self._state, text=text))


class Run:
    """A run on the hosts. It continues when the program ends.

    A thread of this process follows a run that `Cluster.train` has started, and restarts it as the launch options say.
    Another one is followed by `follow` or `wait`. `name`: of the run.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        call: Call,
        follow: Callable[[], Mapping[str, Any]] | None = None,
        log: EventLog | None = None,
    ) -> None:
        """Take the name of a run.

        `call`: with the hosts on which it is searched. `follow`: follows it to its end and returns its result; a thread
        calls it at once. `log`: gets its lines.
        """
        self.name, self._cluster, self._log = name, cluster, log or EventLog()
        self._hosts, self._connect, self._launch = call.cluster.hosts, call.cluster.connect, call.launch
        self._thread: threading.Thread | None = None
        self._result: RunResult | None = None
        self._error: Exception | None = None
        if follow:
            self._begin(follow)

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def _begin(self, follow: Callable[[], Mapping[str, Any]]) -> None:
        def work() -> None:
            try:
                with front_end.serving_program():
                    self._result = _result(self.name, follow())
            except Exception as error:
                self._error = error
            finally:
                self._log.events.put(None)

        # A daemon: the end of the program does not wait for the end of the run.
        self._thread = threading.Thread(target=work, name=f"follow {self.name}", daemon=True)
        self._thread.start()

    def follow(self) -> Iterator[Event]:
        """Yield what happens, to the end of the run; lines before this call come first.

        Raises RunError: the run has failed; its `details` have the evidence.
        """
        if self._thread is None:
            self._begin(self._attach)
        while (event := self._log.events.get()) is not None:
            yield event
        self._log.events.put(None)  # for further calls
        if self._error:
            raise self._error

    def wait(self) -> RunResult:
        """Return the result when the run has ended. Raises as `follow`."""
        for _ in self.follow():
            pass
        assert self._result
        return self._result

    @property
    def result(self) -> RunResult | None:
        """The result; None while the run has none: it trains, or it has failed. The hosts are asked once it is known."""
        if self._result is None and self._thread is None:
            values = self._read("result.json", parse_result)
            self._result = _result(self.name, values) if values else None
        return self._result

    @property
    def status(self) -> str:
        """State of the run on its first host: running, finished, stopped, failed or lost. Raises RunError."""
        return self._part().status

    def stop(self, **options: Any) -> None:
        """Stop the run after a checkpoint; return when it has stopped. `options`: those of the command `stop`, such as `grace`."""
        self._cluster.command("stop", run=self.name, **options)

    def metrics(self) -> list[Metric]:
        """Return the records of metrics.jsonl on the first host, one for each step. Raises RunError."""
        return [pick(Metric, record) for record in self._read("metrics.jsonl", _records) or []]

    def _attach(self) -> Mapping[str, Any]:
        where = (self._hosts, self._connect, self._launch, self._log.line, self._log.watch)
        ended = follow_run(self.name, *where)
        return self._read("result.json", parse_result) or ended

    def _part(self) -> HostRun:
        parts, missing = find_parts(self.name, self._hosts, self._connect, self._launch.answer_limit)
        if parts:
            return parts[0]
        for host, why in missing.items():
            raise RunError(f"{host}: {why}")
        raise no_such_run(self.name)

    def _read(self, file: str, parse: Callable[[str, str | None], Any]) -> Any:
        """Return the contents of a file of the run folder on the first host. Raises RunError, RemoteError."""
        part = self._part()
        answer = self._connect(part.host).call("read_files", {"run_dir": part.run_dir, "text": [file]})
        return parse(part.host, answer["text"].get(file))


def _result(name: str, values: Mapping[str, Any]) -> RunResult:
    return pick(RunResult, values, run=name, values=values)


def _records(host: str, text: str | None) -> list[dict[str, Any]]:
    try:
        lines = [untrusted_json(line) for line in (text or "").splitlines(keepends=True) if line.endswith("\n")]
        found: list[dict[str, Any]] = checked_reply("metrics.jsonl", {"records": lines})["records"]
    except ReplyError as error:
        raise RunError(f"{host}: {error}") from None
    return found
