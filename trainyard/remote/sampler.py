"""Sends samples of this host and the states of its runs, and answers queries, until standard input ends.

Standard library only. Every line of the output is a JSON object with its `kind`; `trainyard.wire.reply_types.sample_replies` has
the types. Every line of the input is a query, or empty to keep the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import SupervisorError, read_json
from trainer.supervise.status import read_state
from trainyard.remote import queue as slurm_queue
from trainyard.remote.host_use import HostUse, gpu_use, ollama_use
from trainyard.remote.run_queries import QUERIES, RUN_NAME
from trainyard.remote.trees import matching

TICK = 0.5  # s between two checks of the runs that are alive
SCAN = 2.0  # s between two checks of all run folders, and between two samples of the host
BEAT = 1.0  # s without a line after which an empty one is sent
SILENCE = 30.0  # s without a line from the controller after which the connection counts as lost
OLLAMA = 10.0  # s between two requests to Ollama
CHECKPOINTS = 50  # of a run, the newest
CHECKPOINT_FILES = 20_000  # of them together
_OUTPUT = threading.Lock()  # of standard output


def sample(request: dict[str, Any]) -> dict[str, Any]:
    """Send samples until standard input ends, or is silent for SILENCE seconds.

    `request`: `data_dir`; `address`, the cluster address of this host; `ollama_urls`, where it may reach its Ollama.
    """
    try:
        Sampler(request).run()
    except BrokenPipeError:
        os._exit(0)  # the controller has disconnected
    return {"kind": "end"}


class Sampler:
    """One connection: what was sent, and the queries that have arrived."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.runs_dir = LinkFreePath(Path(request["data_dir"], "runs"))
        self._queue_dir = Path(request["data_dir"]) / "queue"
        self._queue_asked = threading.Lock()
        self._known: dict[str, tuple[Any, ...]] = {}  # run: when its files changed last
        self._sent: dict[str, dict[str, Any]] = {}  # the states of runs that are alive
        self._alive: set[str] = set()
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._use = HostUse(request)
        self._slow: dict[str, dict[str, Any]] = {}  # the latest answers of programs that may hang
        threading.Thread(target=self._receive, daemon=True).start()
        self._repeat("gpus", SCAN, gpu_use)
        self._repeat("ollama", OLLAMA, lambda: ollama_use(request))

    def run(self) -> None:
        """Send until the connection ends."""
        heard = time.monotonic()
        scan = tick = sent = 0.0
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, tick - time.monotonic()))
                if line is None:
                    return
                heard = time.monotonic()
                if line.strip():
                    self._reply(line)
            except queue.Empty:
                pass
            now = time.monotonic()
            if now - heard > SILENCE:
                return
            if now < tick:
                continue
            tick = now + TICK
            if now >= scan:
                scan = now + SCAN
                self._send({"kind": "host", **self._use.read(), **self._slow})
                sent = now
            sent = now if self._send_runs(every=scan == now + SCAN) else sent
            if now - sent >= BEAT:
                self._send({"kind": "beat", "now": time.time()})
                sent = now

    def _reply(self, line: bytes) -> None:
        """Answer a query; one about the queue in a thread, because Slurm may hang."""
        request = _request(line)
        if request.get("query") != "queue":
            self._send({"kind": "reply", **_answer(request, lambda: QUERIES[request["query"]](self.runs_dir, request))})
        elif self._queue_asked.acquire(blocking=False):
            threading.Thread(target=self._reply_queue, args=(request,), daemon=True).start()
        else:
            error = "Slurm has not answered the question before this one"
            self._send({"kind": "reply", "id": request.get("id", 0), "error": error})

    def _reply_queue(self, request: dict[str, Any]) -> None:
        asked = {"folder": str(self._queue_dir), "recent": request.get("recent", 0)}
        try:
            reply = _answer(request, lambda: slurm_queue.info(asked))
        finally:
            self._queue_asked.release()
        with contextlib.suppress(BrokenPipeError):  # `run` ends the process
            self._send({"kind": "reply", **reply})

    def _receive(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in sys.stdin.buffer:
                self._lines.put(line)
        self._lines.put(None)

    def _repeat(self, name: str, interval: float, read: Callable[[], Any]) -> None:
        """Read a value repeatedly in a thread, because its program may hang."""

        def loop() -> None:
            while True:
                self._slow[name] = read()
                time.sleep(interval)

        threading.Thread(target=loop, daemon=True).start()

    @staticmethod
    def _send(line: dict[str, Any]) -> None:
        with _OUTPUT:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    def _send_runs(self, every: bool) -> bool:
        """Send the runs whose state changed; with `every`, of all runs, otherwise of those that are alive."""
        names = self._alive
        if every:
            names = set()
            with contextlib.suppress(OSError):
                runs = filter(RUN_NAME.fullmatch, self.runs_dir.entries())
                names = {name for name in runs if (self.runs_dir / name).is_folder()}
            for name in self._known.keys() - names:
                del self._known[name]
                self._alive.discard(name)
                self._send({"kind": "gone", "name": name})
        changed = [name for name in sorted(names) if self._send_run(name, every)]
        return bool(changed)

    def _send_run(self, name: str, every: bool) -> bool:
        folder = self.runs_dir / name
        stamp = tuple(_changed(folder / part) for part in ("state", "checkpoints", "result.json"))
        if stamp == self._known.get(name) and not (every and name in self._alive):
            return False
        try:
            (folder / "state/node.json").stat()
            state = read_state(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False  # not started yet
        except (OSError, KeyError, TypeError, ValueError):
            state = None
        if state is None or state["node"] is None:
            self._known[name] = stamp
            self._send({"kind": "unreadable", "name": name})
            return True
        self._alive = self._alive | {name} if state["alive"] else self._alive - {name}
        without_time = {key: value for key, value in state.items() if key != "now"}
        if stamp == self._known.get(name) and without_time == self._sent.get(name):
            return False
        self._known[name] = stamp
        self._sent.pop(name, None)
        if state["alive"]:
            self._sent[name] = without_time
        more = {"checkpoints": checkpoints(folder), "result": read_json(folder / "result.json")}
        self._send({"kind": "run", "name": name, "state": state, **more})
        return True


def checkpoints(run_dir: LinkFreePath) -> list[dict[str, Any]]:
    """Return `step`, `bytes` and `time` of the newest complete checkpoints, by step: of CHECKPOINT_FILES files. They have no folders."""
    found, left = [], CHECKPOINT_FILES
    for folder in reversed(matching(run_dir, "checkpoints/step-*")[-CHECKPOINTS:]):
        with contextlib.suppress(OSError, ValueError):
            names = folder.entries(left)
            left -= len(names)
            size = sum((folder / name).stat().st_size for name in names)
            found.append({"step": int(folder.name[5:]), "bytes": size, "time": folder.stat().st_mtime})
        if not left:
            break
    return found[::-1]


def _changed(path: LinkFreePath) -> int:
    """Return when a file was replaced, or an entry of a folder changed, in ns; 0 for a missing one."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _request(line: bytes) -> dict[str, Any]:
    """Return a query; an empty one for a line that is none."""
    try:
        request = json.loads(line)
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


def _answer(request: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the `answer` to a query or its `error`, with its `id`."""
    number = request.get("id", 0)
    try:
        return {"id": number, "answer": work()}
    except (OSError, LookupError, TypeError, ValueError, SupervisorError) as error:
        return {"id": number, "error": " ".join(str(error).split()) or type(error).__name__}
