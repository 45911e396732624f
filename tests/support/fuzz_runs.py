"""Fuzzers of what code of a rank, and a host, can send to the controller: records of run folders, and replies to each verb."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lying_host
from fuzz_inputs import change, dumps, mutate

from trainer.records.checkpoint import find_defect
from trainer.supervise.claim import claimed_by_another
from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import SupervisorError
from trainer.supervise.start import check_idle
from trainyard.dashboard.records import RunRecords
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import _parse
from trainyard.remote import sampler
from trainyard.remote.__main__ import VERBS
from trainyard.remote.digests import Digests
from trainyard.remote.host_facts import run_state
from trainyard.remote.run_queries import QUERIES
from trainyard.run.follow.artifacts import parse_result, summary
from trainyard.run.follow.monitor import causes
from trainyard.run.follow.run_status import status_rows, valid_runs
from trainyard.run.host_run import HostRun
from trainyard.run.launch.start_record import read_start
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.replies import ReplyError, checked_reply

Special = Callable[[random.Random, Path], Path]
Connect = Callable[[bytes], HostConnection]
PLAN = [{"host": "h", "node_rank": 0, "ranks": [0], "run_dir": "/data/runs/r"}]
START = {"spec": {"model": "tiny"}, "folder": "/srv", "launch": {"min_nodes": 1}, "hosts": ["h"], "variables": ["a=1"]}
STEP = "checkpoints/step-00000005"
# Of the run r on a host, and of the project folder of its controller.
FILES: dict[str, Any] = {
    "runs/r/state/node.json": lying_host.node(0),
    "runs/r/state/rank0.json": lying_host.heartbeat(0),
    "runs/r/claim.json": {"token": "t", "time": lying_host.NOW},
    "runs/r/plan.json": PLAN,
    "runs/r/result.json": lying_host.RESULT,
    "runs/r/origin.json": {"model": "tiny", "dataset": "d"},
    "runs/r/metrics.jsonl": {"step": 1, "loss": 2.0, "rows": [2, 2], "step_seconds": [0.1], "comm_share": [0.2]},
    "runs/r/evals.jsonl": {"step": 1, "eval_loss": 2.0},
    "runs/r/spec.yml": {"model": "tiny", "run": "r"},
    "runs/r/logs/rank0.log": ["a line"],
    f"runs/r/{STEP}/manifest.json": {"files": {"state.pt": {"bytes": 7, "sha256": "0" * 64}}, "elsewhere": {}},
    f"runs/r/{STEP}/state.pt": "tensor",
    "store/digests.json": {"/a": [1, 2, 3, 4, "0" * 64]},
    ".trainyard/starts/r.json": START,
}
VERB_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("run_status", {"logs_from": {"rank0.log": 0}}),
    ("run_status", {"brief": True, "logs_from": {"rank0.log": -5}}),
    ("run_status", {"plain": True}),
    ("run_stop", {"now": True, "wanted": True}),
    ("run_list", {}),
    ("checkpoints", {}),
    ("read_files", {"text": ["result.json", "plan.json"], "sizes": ["logs/*.log", "state/rank*.json"]}),
]


def write_folder(rng: random.Random, folder: Path, special: Special) -> None:
    """Write the files of a run, one to three of them hostile: other JSON, damaged bytes, no file, or none at all."""
    hostile = rng.sample(list(FILES), rng.randrange(1, 4))
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = rng.randrange(8) if name in hostile else 8
        if kind == 0 and not name.startswith(".trainyard"):  # what the user of the controller has written
            found = special(rng, path.parent)
            if found.parent == path.parent:  # else it is a path of this machine: root would move /etc/passwd
                with contextlib.suppress(OSError, ValueError):
                    found.rename(path)
        elif kind == 1:
            path.write_bytes(rng.choice([b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000_000, b"\n" * 3_000_000]))
        elif kind > 2:
            data = dumps(change(rng, content) if kind < 6 else content)
            path.write_bytes(mutate(rng, data) if 5 < kind < 8 else data + b"\n")


def fuzz_runs(rng: random.Random, folder: Path, special: Special, connect: Connect) -> None:
    """Let each side read a hostile run folder: verbs of the host, the sampler, and the controller that gets their answers."""
    write_folder(rng, folder, special)
    run_dir = folder / "runs/r"
    kind = rng.randrange(4)
    if kind == 0:
        read_on_host(folder, run_dir)
    elif kind == 1:
        show_samples(folder)
    else:
        verb, request = rng.choice(VERB_REQUESTS)
        module, name, _ = VERBS[verb]
        request = {"run_dir": str(run_dir), "folder": str(run_dir), "data_dir": str(folder), **request}
        try:
            answer = getattr(importlib.import_module(module), name)(request)
        except (SupervisorError, OSError, ValueError) as error:  # as the entry point of the archive does
            answer = {"error": " ".join(str(error).split())}
        show(verb, connect(b"noise\n" + json.dumps(answer).encode() + b"\n").run("true", verb=verb))


def read_on_host(folder: Path, run_dir: Path) -> None:
    """Read what no verb alone returns."""
    for read in (run_state, check_idle, functools.partial(claimed_by_another, token="t")):
        with contextlib.suppress(SupervisorError, OSError, ValueError):
            read(LinkFreePath(run_dir.parent, run_dir.name))
    find_defect(run_dir / STEP)
    digests = Digests(folder / "store/digests.json")
    digests.of(run_dir / STEP / "state.pt")
    digests.keep()
    read_start(folder, "r")


def show_samples(folder: Path) -> None:
    """Send the run to a dashboard, with the answers to its queries."""
    sent, cluster = io.StringIO(), ClusterView([Host("h", "127.0.0.1", str(folder), "/usr/bin/python3")])
    reader = sampler.Sampler.__new__(sampler.Sampler)
    runs_dir = LinkFreePath(folder / "runs")
    reader.runs_dir, reader._known, reader._sent, reader._alive = runs_dir, {}, {}, set()
    with contextlib.redirect_stdout(sent):
        reader._send_runs(every=True)
    for line in sent.getvalue().splitlines():
        if parsed := _parse(line.encode()):
            cluster.receive("h", *parsed)
    for run in cluster.runs.values():
        assert run.attempt >= 0 and run.started is not None and run.first is not None
        assert run.ended or run.comm_share or run.alive is not None
    for query, more in (
        ("describe", {}),
        ("log", {"file": "rank0.log", "since": -3}),
        ("search", {"file": "rank0.log", "text": "a"}),
    ):
        with contextlib.suppress(OSError):
            checked_reply(f"query {query}", QUERIES[query](runs_dir, {"run": "r"} | more))
    records = RunRecords("r")

    class Stream:
        async def ask(self, query: str, **request: Any) -> dict[str, Any]:
            return checked_reply(f"query {query}", QUERIES[query](runs_dir, request))

    for file, add in (("metrics.jsonl", records._add_step), ("evals.jsonl", records._add_eval)):
        with contextlib.suppress(OSError, ReplyError):
            asyncio.run(records._read_file(Stream(), file, f"{file} line", add))  # type: ignore[arg-type]
    json.dumps(records.series(), allow_nan=False)


def fuzz_verbs(rng: random.Random, folder: Path, special: Special, connect: Connect) -> None:
    """Take a hostile reply of a host to any verb."""
    verb = rng.choice(
        ("host_facts", "health", "hardware", "mesh", "run_status", "run_stop", "run_list", "checkpoints", "read_files")
    )
    host = Host("h", "127.0.0.1", str(folder), "/usr/bin/python3")
    request = {"peers": {"n": "127.0.0.1"}, "ports": [1], "text": ["result.json", "plan.json"], "paths": ["/a"]}
    out = dumps(change(rng, lying_host.honest(verb, request, host, 0)))
    show(verb, connect(mutate(rng, out) if rng.random() < 0.3 else out).run("true", verb=verb))


def show(verb: str, answer: dict[str, Any]) -> None:
    """Use a checked reply as the controller does."""
    if verb == "run_list":
        for state in valid_runs(answer["runs"])[0]:
            status_rows("h", state)
    elif verb == "run_status":
        status_rows("h", answer)
        part = HostRun("h", "/data/runs/r", 0, [0], answer=answer)
        for cause in causes([part], 10.0):
            assert str(cause)
    elif verb == "read_files" and (result := parse_result("h", answer["text"].get("result.json"))):
        summary("r", result, PlanEntry("h", run_dir="/r"), 1, HostConnection(Host("h", "::1", "/d", "p"), None), None)
