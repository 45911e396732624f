"""A host that answers the controller's requests as a test defines: a transport in this process, without a host."""

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tables import table

from trainyard.remote.exchange import FOLDER
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host, HostConnection

NOW = 1763690000.0
RUN = "r"
FILES = {"result.json": b"{}", "adapter/adapter_model.safetensors": b"weights"}
FILES |= dict.fromkeys(("logs/rank0.log", "logs/rank1.log", "logs/torchrun.1.log"), b"line\n")

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
    """Hosts node1, node2 and so on, which lie as a test defines."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.hosts = [
            Host(f"node{n}", f"10.0.0.{n}", f"{folder}/data{n}", "/usr/bin/python3") for n in range(1, count + 1)
        ]
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


_ANSWERS = table("honest_answers")
RESULT = _ANSWERS["result"]
GGUF = b"GGUF"


def filled(value: Any, names: dict[str, Any]) -> Any:
    """Return a value of the table with the values of a host in the place of their names."""
    if isinstance(value, dict):
        return {filled(str(key), names) if "@" in str(key) else key: filled(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    if not isinstance(value, str) or "@" not in value:
        return value
    if value in names:
        return names[value]
    for name, text in names.items():
        value = value.replace(name, str(text))
    return value


def honest(verb: str, request: dict[str, Any], host: Host, number: int) -> dict[str, Any]:
    """Return the honest answer of a host to a verb."""
    if verb == "receive":
        return {"lacking": [], "changed": list(request.get("files", {}))}
    if verb == "local_files":
        names = {"config.json": [2, "0" * 64], "a/b": [5, "1" * 64]}
        file = {"kind": "folder", "names": names, "texts": {"config.json": "{}"}, "error": ""}
        return {"files": dict.fromkeys(request.get("paths", []), file)}
    if verb == "read_files":
        return read_files(number, request)
    known = {"@name": host.name, "@address": host.address, "@data": host.data_dir, "@number": number}
    answer: dict[str, Any] = filled(_ANSWERS[verb], known | {"@now1": NOW + 1, "@now": NOW})
    if verb == "run_status":
        answer["ranks"] = {str(rank): beat for rank, beat in answer["ranks"].items()}
    if verb == "mesh":
        link = {"latency_ms": 0.2, "ping_small": True, "ping_large": True, "mbit": 900.0}
        peers, ports = request.get("peers", {}), {str(port): "" for port in request.get("ports", [])}
        answer |= {"reached": dict.fromkeys(peers, ports), "lines": dict.fromkeys(peers, link)}
        answer["services"] = dict.fromkeys(request.get("services", {}), "no answer")
    if verb == "queue_info" and not request.get("specs"):
        answer["specs"] = {}
    if verb == "run_list":
        answer["runs"] = [honest("run_status", request, host, number)]
    return answer


def node(number: int) -> dict[str, Any]:
    found: dict[str, Any] = honest("run_status", {}, Host("h", "10.0.0.9", "/data", "/p"), number)["node"]
    return found


def heartbeat(number: int) -> dict[str, Any]:
    found: dict[str, Any] = honest("run_status", {}, Host("h", "10.0.0.9", "/data", "/p"), number)["ranks"][str(number)]
    return found


def read_files(number: int, request: dict[str, Any]) -> dict[str, Any]:
    names = {name: len(data) for name, data in FILES.items()} | {f"state/rank{number}.json": 2}
    sized = request.get("sizes", ["*"])
    names = {name: size for name, size in names.items() if any(fnmatchcase(name, pattern) for pattern in sized)}
    texts = {"result.json": json.dumps(RESULT), "spec.yml": "model: /srv/model\n"}
    patterns = (request["sha256"] or ["*"]) if "sha256" in request else []
    wanted = [name for name in FILES if any(fnmatchcase(name, pattern) for pattern in patterns)]
    digests = {name: hashlib.sha256(FILES[name]).hexdigest() for name in wanted}
    return {"text": {name: texts.get(name) for name in request.get("text", [])}, "sizes": names, "sha256": digests}


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
