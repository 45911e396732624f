"""A host that answers the controller's requests as a test defines: a transport in this process, without a host."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainyard.remote.exchange import FOLDER
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host, HostConnection

NOW = 1763690000.0
RUN = "r"
FILES = {
    "result.json": b"{}",
    "adapter/adapter_model.safetensors": b"weights",
    "logs/rank0.log": b"line\n",
    "logs/rank1.log": b"line\n",
    "logs/torchrun.1.log": b"line\n",
}

Lie = Callable[[str, dict[str, Any], dict[str, Any]], Any]
"""Takes the verb, the request and the honest answer; returns an answer, or the bytes of the whole output."""


class LyingTransport:
    """Answers every verb honestly, unless `lie` returns something else."""

    kind = "ssh"

    def __init__(self, host: Host, number: int, lie: Lie | None = None) -> None:
        self.host, self.number, self.lie = host, number, lie
        self.content = FILES | {"model.gguf": GGUF} | CHECKPOINT
        self.lent: dict[str, str] = {}  # the name of every file that can be fetched, by its path on the host
        self.asked: list[tuple[str, dict[str, Any]]] = []  # every verb with its request

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        verb = "begin" if command.startswith("cd -P") else shlex.split(command)[-1]
        request: dict[str, Any] = {}
        if stdin:
            size, _, rest = stdin.partition(b"\n")
            request = json.loads(rest[int(size) :])
        if verb == "gguf_export":
            request = request["input"]
        if verb == "ollama":  # one verb with several steps, each with its own reply
            verb = f"ollama_{request['step']}"
        self.asked.append((verb, request))
        if verb == "exchange":
            folder = f"{request['root']}/{FOLDER}/{request['token']}"
            self.lent |= {f"{folder}/{number}": name for number, name in enumerate(request.get("lend", []))}
        answer = honest(verb, request, self.host, self.number)
        if self.lie:
            answer = self.lie(verb, request, answer)
        return 0, answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n", b""

    def put(self, source: str, target: str) -> None:
        """Accept a file."""

    def fetch(self, source: str, target: str) -> None:
        source = self.lent[source]
        Path(target).write_bytes(next((data for name, data in self.content.items() if source.endswith(name)), b""))

    def abort(self) -> None:
        """End nothing: nothing is in progress."""


class Cluster:
    """Two hosts, node1 and node2, of which the second one lies."""

    def __init__(self, folder: Path) -> None:
        self.hosts = [Host(f"node{n}", f"10.0.0.{n}", f"{folder}/data{n}", "/usr/bin/python3") for n in (1, 2)]
        self.transports = {host.name: LyingTransport(host, n) for n, host in enumerate(self.hosts)}

    def connect(self, host: Host | str) -> HostConnection:
        name = host if isinstance(host, str) else host.name
        return HostConnection(self.transports[name].host, self.transports[name])

    def entries(self) -> list[PlanEntry]:
        return [
            PlanEntry(
                *(host.name, number, [number], host.address, "eth0", 1),
                *(f"{host.data_dir}/runs/{RUN}", host.data_dir, ["true"]),
            )
            for number, host in enumerate(self.hosts)
        ]


def node(number: int) -> dict[str, Any]:
    return {
        "run": RUN, "node_rank": number, "ranks": [number], "hosts": ["node1", "node2"], "attempt": 1, "pid": 7,
        "started": NOW, "ended": None, "status": "running", "exit_code": None, "oom": False, "backend": "process",
        "unit": None, "restarts": False, "pid_start": 5,
        "failures": [{"rank": number, "exit_code": 1, "signal": None, "pid": 9}],
    }  # fmt: skip


def heartbeat(number: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": number, "pid": 9, "status": "training", "time": NOW, "step": 3, "steps": 9, "loss": 2.5, "note": "",
        "tokens_per_second": 100.0, "eta": 5.0, "step_seconds": [0.1, 0.2], "process": "S",
        "gpu": {"utilisation_percent": 50.0, "memory_peak_gb": 1.0},
        "error": {"type": "ValueError", "message": "no", "traceback": "a\nb", "plain": False, "secondary": False},
    } | more  # fmt: skip


def status(host: Host, number: int) -> dict[str, Any]:
    run_dir = f"{host.data_dir}/runs/{RUN}"
    log = {"path": f"{run_dir}/logs/rank{number}.log", "offset": 5, "lines": ["a", "b"]}
    return {
        "status": "running", "alive": True, "now": NOW + 1, "run_dir": run_dir, "node": node(number),
        "ranks": {str(number): heartbeat(number)}, "stop_wanted": False, "why": "", "logs": {f"rank{number}.log": log},
    }  # fmt: skip


def facts(host: Host, number: int) -> dict[str, Any]:
    return {
        "boot_id": host.name, "machine_id": host.name, "addresses": [host.address], "source": host.address,
        "interface": "eth0", "link_mbit": 1000, "route_error": "", "free_ports": [29500, 29501], "cpus": 4,
        "memory_mib": 8000, "gpus": [], "allocator": "", "compiler": True, "versions": {"torch": "2.13.0"},
        "python_exists": True, "free_bytes": 10**12, "staged": {"/d": 3}, "may_write": True, "spec": None, "result": None, "rows": [],
        "running": False, "part": None, "stop_wanted": False, "busy_with": "", "unreadable": [], "firewall": "ufw",
        "addresses_v6": ["fe80::1"],
    }  # fmt: skip


def health(host: Host) -> dict[str, Any]:
    device = {"name": "eth0", "address": host.address, "mask": "255.255.255.0", "mtu": 1500, "mbit": 1000}
    return {
        "hostname": host.name, "kernel": "6.1", "devices": [device | {"wireless": False, "virtual": False}],
        "names": {"addresses": {"node1": ["10.0.0.1"], "node2": ["10.0.0.2"]}, "seconds": 0.1},
        "memory": {"total_mib": 8000, "available_mib": 7000}, "memory_allocated": True, "quota": None, "load": 0.1,
        "busy": [{"pid": 4, "name": "x", "uid": 0, "cores": 2.0}], "spin": {"share": 1.0, "gap": 0.0, "pauses": 0},
        "torchruns": [{"pid": 5, "command": "torchrun"}], "sudo": True, "inodes_free": 10**6, "clock": [NOW, NOW + 1],
        "gpu": {"cards": 1, "gpus": [{"name": "A", "total_mib": 1, "used_mib": 1}], "users": ["1, x, 2 MiB"]},
        "hardware": hardware(),
        "files": {"damaged": ["/d/x"], "equal": {"datasets/a": "0" * 64}},
        "wsl": {"networking": "nat", "sshd": False, "driver": ["nvidia-driver-580"], "memory_set": False},
    }  # fmt: skip


def hardware() -> dict[str, Any]:
    return {
        "gpus": [{"name": "A", "memory_mib": 1000, "links": "PCIe 4 x16"}], "cpu": "C", "cores": 4, "memory_mib": 8000, "free_bytes": 10**12,
        "models": ["m:1b"], "model_count": 1,
    }  # fmt: skip


def mesh(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    link = {"latency_ms": 0.2, "ping_small": True, "ping_large": True, "mbit": 900.0}
    peers = request.get("peers", {})
    ports = {str(port): "" for port in request.get("ports", [])}
    return {
        "mtu": 1500, "taken": [], "reached": dict.fromkeys(peers, ports), "lines": dict.fromkeys(peers, link),
        "services": dict.fromkeys(request.get("services", {}), "no answer"), "shares_with": {}, "write_error": "",
    }  # fmt: skip


def local_file() -> dict[str, Any]:
    names = {"config.json": [2, "0" * 64], "a/b": [5, "1" * 64]}
    return {"kind": "folder", "names": names, "texts": {"config.json": "{}"}, "error": ""}


RESULT = {
    "run": RUN, "status": "finished", "step": 9, "steps": 9, "world_size": 2, "tokens": 100, "samples": 10,
    "tokens_per_second": 5.0, "loss_first": 2.0, "loss_last": 1.0, "eval_loss": 1.0, "adapter": "/x/adapter",
    "merged": "/x/merged", "tensorboard": "/x/tensorboard", "adapter_sha256": "0" * 64,
}  # fmt: skip


def read_files(number: int, request: dict[str, Any]) -> dict[str, Any]:
    names = {name: len(data) for name, data in FILES.items()} | {f"state/rank{number}.json": 2}
    texts = {"result.json": json.dumps(RESULT), "spec.yml": "model: /srv/model\n"}
    patterns = request.get("sha256") or ["*"]
    return {
        "text": {name: texts.get(name) for name in request.get("text", [])},
        "sizes": names,
        "sha256": {
            name: hashlib.sha256(data).hexdigest()
            for name, data in FILES.items()
            if "sha256" in request and any(fnmatchcase(name, pattern) for pattern in patterns)
        },
    }


GGUF = b"GGUF"
ANSWERS = ["After 1 comes 2.", "the sea"]


def gguf_export(host: Host) -> dict[str, Any]:
    prompts = [{"messages": [{"role": "user", "content": "What follows 1?"}]}, {"prompt": "The ship crosses"}]
    answers = {"created": "2026-01-02T03:04:05", "max_tokens": 28, "bos": "<s>", "prompts": prompts, "answers": ANSWERS}
    path = f"{host.data_dir}/runs/{RUN}/deploy/model.gguf"
    digest = hashlib.sha256(GGUF).hexdigest()
    gguf = {"path": path, "bytes": len(GGUF), "sha256": digest, "adds_bos": False, "context": 4096}
    return {"answers": answers, "gguf": gguf, "needs_converter": False}


def ollama_state() -> dict[str, Any]:
    base = {
        "name": "base",
        "digest": "1" * 64,
        "architecture": "llama",
        "shape": [4, 192, 512, 6, 2],
        "tokens": "2" * 64,
        "context": 4096,
    }
    return {
        "server": "", "version": [0, 5, 4], "adapters": True, "digest": "3" * 64, "models": 1, "read": 1,
        "record": {"key": "4" * 64, "digest": "3" * 64, "refused": ["5" * 64]},
        "bases": [base | {"fields": {"tokenizer.ggml.model": "gpt2"}}],
    }  # fmt: skip


def honest(verb: str, request: dict[str, Any], host: Host, number: int) -> dict[str, Any]:
    """Return the honest answer of a host to a verb."""
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "host_facts": lambda: facts(host, number),
        "health": lambda: health(host),
        "hardware": hardware,
        "mesh": lambda: mesh(host, request),
        "receive": lambda: {"lacking": [], "changed": list(request.get("files", {}))},
        "local_files": lambda: {"files": {path: local_file() for path in request.get("paths", [])}},
        "relay": lambda: {"installed": [], "receive_error": "", "send_error": ""},
        "commit": lambda: {"changed": ["spec.yml"]},
        "read_files": lambda: read_files(number, request),
        "run_status": lambda: status(host, number),
        "run_stop": lambda: {"status": "stopped", "killed": 2},
        "run_list": lambda: {"now": NOW + 1, "runs": [status(host, number)], "skipped": []},
        "gguf_export": lambda: gguf_export(host),
        "ollama_state": ollama_state,
        "ollama_prepare": lambda: {"lacking": True},
        "ollama_create": lambda: {"answers": ANSWERS, "accepted": True},
        "ollama_remove": lambda: {"changed": True, "foreign": False},
        "queue_info": lambda: queue_info(request),
        "queue_add": lambda: {"job": 6},
        "queue_again": lambda: {"job": 7},
        "queue_change": lambda: {"changed": [4], "refused": {}},
        "checkpoints": lambda: {"steps": {STEP: {name: len(data) for name, data in CHECKPOINT.items()}}, "shards": {}},
        "lease": lambda: {"held": True, "restart": 0, "gpus": ["0"], "ending": False, "time": NOW, "alive": False},
        "exchange": dict,
        "run_start": lambda: {"backend": "process", "pid": 3, "started": NOW, "ignored": ["MemoryMax=1G"]},
        "begin": lambda: {"now": NOW},
    }
    return answers[verb]()


SLURM_JOBS = [
    "3|normal|RUNNING|None|1763689000|1763693000|1:00:00|node[1-2]|busy",
    "4|low|PENDING|Resources|1763693000|N/A|30:00||waits",
    "5|low|PENDING|Dependency|N/A|N/A|30:00||after-it",
]


def queue_info(request: dict[str, Any]) -> dict[str, Any]:
    requests = {name: {"run": name, "cores": 1} for name in ("busy", "waits", "done")}
    requests["after-it"] = {"run": "after-it", "after": ["busy"], "gpu_memory": 16}
    attempt = {"begin": NOW - 90, "end": NOW - 30, "reason": "preempted", "hosts": {"node1": {"gpus": ["0"]}}}
    states = {"done": {"job": 2, "phase": "finished", "attempts": [attempt]}}
    spec = {"spec": {"run": RUN, "model": "tiny"}, "digests": [["dataset", "0" * 64]]}
    return {
        "jobs": SLURM_JOBS,
        "nodes": ["node1|mixed|8|22848|gpu:rtx3090:2,vram:24", "node2|idle|4|8192|(null)"],
        "hosts": {"node[1-2]": ["node1", "node2"]},
        "runs": {
            name: {"request": json.dumps(asked), "state": json.dumps(states.get(name, {"phase": "waiting"}))}
            for name, asked in requests.items()
        },
        "specs": {"waits": spec} if request.get("specs") else {},
        "now": NOW,
    }  # fmt: skip


STEP = "step-00000005"
CHECKPOINT = {"manifest.json": json.dumps({"files": {"state.pt": {"bytes": 7}}}).encode(), "state.pt": b"tensors"}

PLACEHOLDER = "@huge@"
HOSTILE: list[Any] = [
    None, True, -1, 2**70, 10**400, 1e300, float("nan"), float("inf"), "", "x" * 100_000, "../../../../etc/passwd",
    "/etc/passwd", ".ssh/authorized_keys", "\x1b]0;x\x07\x1b[2J", "\u202etxt.exe", "a\nb", "\0", [], {}, [[]], {"": {}},
    {"../x": 1, "\x1b[2J": {}}, ["\x1b[2J"] * 3, [-1, "x", None], PLACEHOLDER,
]  # fmt: skip


def lies(answer: Any) -> Iterator[Any]:
    """Yield the answer with one value replaced or removed: every value, by every hostile one."""
    for path in places(answer):
        for value in HOSTILE:
            yield changed(answer, path, value)
        yield changed(answer, path, None, remove=True)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (name,)
        yield from ((name, *rest) for rest in places(item))


def changed(value: Any, path: tuple[Any, ...], new: Any, remove: bool = False) -> Any:
    """Return a copy of a value in which the value at a path is another one or missing."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if remove and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new, remove)
    return copy


def encode(answer: Any) -> bytes:
    """Return the answer as JSON, in which a number that no float holds replaces the placeholder."""
    return json.dumps(answer).replace(f'"{PLACEHOLDER}"', "1e999").encode()


NONSENSE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"\x1b[2Jhello\x07\n" * 100,
    "binary": bytes(range(256)) * 1000,
    "half": b'{"a": ',
    "array": b"[1, 2]\n",
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested": b'{"a":' + b"[" * 60 + b"]" * 60 + b"}",
    "digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "large": b'{"a": "' + b"x" * (9 << 20) + b'"}',
    "lines": b"\n" * (4 << 20),
    "keys": b'{"' + b'":1,"'.join(b"%d" % n for n in range(200_000)) + b'": 1}',
    "error": json.dumps({"error": "\x1b[2Jone\ntwo" + "x" * 100_000}).encode(),
    "error-type": json.dumps({"error": {"a": [1, {}]}}).encode(),
}


def check_line(line: str, limit: int = 5000) -> None:
    """Check that a terminal can show a line."""
    assert line.isprintable() and len(line) <= limit, line[:500]


def outside(folder: Path) -> list[Path]:
    """Return the files that an operation has written anywhere but below out/r."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(folder / "out" / RUN)]


def lying(verb: str, answer: bytes) -> Lie:
    """Return a lie that answers one verb with these bytes."""
    return lambda asked, request, truth: answer if asked == verb else truth


def slowly(seconds: float) -> Lie:
    """Return a lie that answers late."""

    def late(verb: str, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        time.sleep(seconds)
        return answer

    return late
