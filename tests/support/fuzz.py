"""Fuzzers with a fixed seed: hostile specs, flags, datasets, replies and settings, given to the functions that read them.

Every input must be accepted or refused with an error of the project, whose message is one printable line, within
`LIMIT` seconds. Inputs are valid examples with mutations, so that they pass the first checks of a parser.

Usage: PYTHONPATH=. python tests/support/fuzz.py [COUNT [SEED]]
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from fuzz_inputs import (
    CONFIGS,
    MODELS,
    NUMBERS,
    RECORDS,
    SPECS,
    VALID,
    YAML_PARTS,
    change,
    dumps,
    mutate,
    text,
    value,
)
from fuzz_runs import fuzz_runs, fuzz_verbs

from trainer import __main__ as command_line
from trainer.common.errors import UserError
from trainer.config import FIELDS, RunSpec
from trainer.config.dataset_source import COLUMNS
from trainer.data.samples import check_source, read_samples, read_source, source_of
from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.model_files.model_shape import layer_class, read_shape, shape_of
from trainer.spec import make_spec, read_spec
from trainer.strategy import STRATEGIES
from trainer.supervise.environment import run_environment
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError
from trainyard import extra_vars
from trainyard.discovery import ollama_replies as replies
from trainyard.provision.addresses import address_errors
from trainyard.run.launch_options import OPTIONS, make_options, options_from_variables
from trainyard.run.plan.nodes import environment
from trainyard.run.prepare.spec_files import dataset_file
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host, HostConnection, InventoryError, RemoteError
from trainyard.wire.replies import ReplyError
from trainyard.wire.run_errors import RunError

os.environ["HF_HUB_OFFLINE"] = "1"  # no input reaches the network
TOP = Path(__file__).resolve().parents[2]
LIMIT = 20.0  # seconds for one input, which takes milliseconds on an idle machine
MAX_MESSAGE = 2000  # characters of an error message
MEMORY = 1 << 30  # bytes that all inputs of a target may add to the process
EXPECTED = (UserError, RunError, RemoteError, InventoryError, OllamaError, ReplyError, SupervisorError)
SEED = 14


class Hang(BaseException):
    """An input took longer than `LIMIT`."""


class Broken(AssertionError):
    """An input was accepted or refused in a wrong way, such as with a message of two lines."""


@dataclass
class Outcome:
    """The outcomes of the inputs of one target."""

    target: str
    seed: int
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    hangs: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the counts as one line."""
        return (
            f"{self.target:<9} seed {self.seed}: {self.inputs} inputs, {self.accepted} accepted, {self.refused} refused, "
            f"{len(self.tracebacks)} tracebacks, {len(self.hangs)} hangs, {self.seconds:.1f} s, slowest {self.slowest:.2f} s"
        )


# Targets --------------------------------------------------------------------------------------------------------------


def fuzz_spec(rng: random.Random, folder: Path) -> None:
    """Read a YAML file as a run spec; an accepted spec survives a round trip."""
    data = rng.choice(SPECS)
    kind = rng.randrange(5)
    if kind == 4:
        data += "".join(f"{name}: {json.dumps(entry)}\n" for name, entry in rng.sample(VALID, 3) if name in FIELDS)
    if kind == 0:
        name, entry = (
            rng.choice(list(FIELDS)),
            rng.choice([text(rng), rng.choice(YAML_PARTS), str(rng.choice(NUMBERS[:7]))]),
        )
        data += f"{name}: {entry}\n"
    elif kind == 1:
        with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
            data = yaml.safe_dump({rng.choice([*FIELDS, text(rng)]): value(rng) for _ in range(rng.randrange(1, 4))})
    elif kind == 2:
        data = f"{data}{rng.choice(YAML_PARTS)}\n"
    raw = data.encode(errors="replace")
    file = folder / "spec.yml"
    file.write_bytes(mutate(rng, raw) if kind == 3 else raw)
    spec = read_spec(file, {}, "the flags").named()
    file.write_text(spec.to_yaml())
    if read_spec(file, {}, "the flags") != spec:
        raise Broken("the spec differs after a round trip through YAML")
    spec.digest()


def variables(rng: random.Random) -> dict[str, Any]:
    """Return valid values of settings by name, and in most cases a hostile one."""
    values = dict(rng.sample(VALID, rng.randrange(4)))
    if rng.random() < 0.7:
        values[rng.choice([*FIELDS, *OPTIONS, text(rng)])] = value(rng)
    return values


def arguments(rng: random.Random, folder: Path) -> list[str]:
    """Return the command line of a command that only reads: check, plan or config."""
    argv = [rng.choice(["check", "check", "plan", "config"])]
    argv += [rng.choice(["deepspeed", "fsdp", "accelerate", "slurm", text(rng)])] if argv == ["config"] else []
    argv += ["--no-measure", f"--data-dir={folder}"] if argv == ["plan"] else []
    for name, content in variables(rng).items():
        if name in OPTIONS and rng.random() < 0.9:
            continue
        shown = content if isinstance(content, str) else dumps(content).decode()
        argv += [rng.choice([f"--{name}={shown}"] * 3 + [f"{name}={shown}", f"--{name}", shown])]
    for flag in ("--hosts", "--head", "--link-mbit", "--data-dir"):
        if rng.random() < 0.08:
            argv.append(f"{flag}={text(rng)}")
    return [word.replace("\0", "").encode(errors="ignore").decode() for word in argv if word not in ("--help", "-h")]


def fuzz_flags(rng: random.Random, folder: Path) -> None:
    """Run commands of the trainer with hostile flags, and read hostile -e values."""
    if rng.random() < 0.4:
        plain = extra_vars.plain_data(variables(rng))
        options_from_variables(plain, lambda content: content)
        extra_vars.read_run_spec(str(plain.get("spec") or ""), plain, TOP)
        return
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line.main(arguments(rng, folder))
    for line in err.getvalue().split("\n")[:-1]:
        require_line(line)
    if code:
        raise UserError(err.getvalue().strip())


def fuzz_dataset(rng: random.Random, folder: Path) -> None:
    """Check a dataset file, or a path without one."""
    if rng.random() < 0.1:
        path = special_file(rng, folder)
        dataset_file(make_spec({"dataset": str(path)}, "the flags"))
        read_samples(path)
        return
    suffix = rng.choice(
        [".jsonl", ".jsonl", ".jsonl", ".json", ".json", ".jsonl.gz", ".txt", ".csv", ".tsv", ".parquet", ".arrow", ""]
    )
    records = [
        change(rng, record) if rng.random() < 0.4 else record for record in rng.choices(RECORDS, k=rng.randrange(1, 4))
    ]
    data = dumps(records) if suffix == ".json" else b"\n".join(map(dumps, records))
    if rng.random() < 0.4:
        data = mutate(
            rng, rng.choice([data, b"instruction,output\na,b\n", b'{"a":' * 2000, b"[" * 50_000, b"9" * 5000])
        )
    if suffix.endswith(".gz"):
        data = gzip.compress(data)
        data = mutate(rng, data) if rng.random() < 0.2 else data
    path = folder / f"data{suffix}"
    path.write_bytes(data)
    columns = {rng.choice(COLUMNS): rng.choice(["a", "text", "messages", "prompt", "output"])}
    (source,) = make_spec({"dataset": str(path), "columns": columns if rng.random() < 0.2 else {}}, "the flags").sources
    for sample in read_source(source):
        for part in [*(message["content"] for message in sample.messages), *(piece for piece, _ in sample.pieces)]:
            part.encode()


def fuzz_table(rng: random.Random, folder: Path) -> None:
    """Check a Parquet or Arrow file, or a saved dataset, with changed values or bytes."""
    import pyarrow
    from pyarrow import parquet

    rows = 60_000 if rng.random() < 0.1 else rng.randrange(6)
    texts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), ["x" * rng.choice([3, 9000])]
    )
    table = pyarrow.table({rng.choice(["text", "text", "messages", "a"]): texts})
    path = folder / rng.choice(["a.parquet", "a.arrow", "saved/a.arrow"])
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, store_schema=rng.random() < 0.5)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    if rng.random() < 0.6:
        path.write_bytes(mutate(rng, path.read_bytes()))
    if path.parent != folder:
        state = {
            "_data_files": [{"filename": rng.choice(["a.arrow", "a.arrow", "../a.arrow", text(rng)])}],
            "_split": "train",
        }
        (path.parent / "state.json").write_bytes(dumps(change(rng, state) if rng.random() < 0.5 else state))
        (path.parent / "dataset_info.json").write_bytes(dumps(rng.choice([{}, {}, value(rng)])))
        path = path.parent
    check_source(source_of(path))


def special_file(rng: random.Random, folder: Path) -> Path:
    """Return a path that exists as something else than a file, or that cannot exist."""
    path = folder / f"special{rng.randrange(10**9)}.jsonl"
    kind = rng.randrange(8)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/dev/tty", "/proc/self/mem", "/proc/kmsg", str(path)]))
    elif kind == 2:
        with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.bind(str(path))
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        return Path(rng.choice(["~nosuchuser/x", "x" * 300, "d/" * 2500 + "x", "/dev/stdin", "/proc/self/fd/0"]))
    elif kind == 5:
        path.write_bytes(b"")
        path.chmod(0)
    else:
        return Path(text(rng) or ".")
    return path


def fuzz_replies(rng: random.Random, folder: Path) -> None:
    """Parse replies of discovered servers, read over a socket, and of hosts."""
    if rng.random() < 0.5:
        answer = rng.choice([{"error": "text"}, {"changed": [], "facts": {"cpus": 2}}, {"lacking": ["a"]}])
        out = b"noise\n" + dumps(change(rng, answer)) + b"\n"
        HostConnection(HOST, Canned(mutate(rng, out) if rng.random() < 0.5 else out)).run("true")
        return
    body = dumps(rng.choice([MODELS, {"version": "0.12.3"}]))
    body = dumps(change(rng, json.loads(body))) if rng.random() < 0.5 else mutate(rng, body)
    head = rng.choice(
        [
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body),
            b"HTTP/1.0 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body),
        ]
    )
    reply = head + body + (b"\r\n0\r\n\r\n" if b"chunked" in head else b"")
    reply = mutate(rng, reply) if rng.random() < 0.4 else reply
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = OllamaClient(f"http://127.0.0.1:{server.getsockname()[1]}", deadline=1.0)

        def answer() -> None:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.settimeout(LIMIT)
                connection.sendall(reply[:100_000])
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            received = client.get("/api/tags", limit=2 << 20)
        finally:
            answering.join()
    refusals = []
    for parse in (replies.version, replies.models, replies.loaded):
        try:
            parse(received)
        except OllamaError as error:
            refusals.append(error)
    if len(refusals) == 3:
        raise refusals[0]


def fuzz_settings(rng: random.Random, folder: Path) -> None:
    """Read launch options, environment variables, addresses of an inventory, and a model's config.json."""
    kind = rng.randrange(4)
    if kind == 0:
        make_options({rng.choice([*OPTIONS, text(rng)]): value(rng) for _ in range(rng.randrange(1, 4))}, "-e")
    elif kind == 1:
        names = ["TOKEN", "HF_HOME", "A", text(rng)]
        given = make_options({"run_env": {rng.choice(names): rng.choice([text(rng), value(rng)])}}, "-e").run_env
        file = folder / "env"
        file.touch(mode=0o600)
        file.write_bytes(environment(NODE, given).encode())
        found = run_environment(link_free(folder))
        if any(found[name] != content for name, content in given.items()):
            raise Broken("the ranks would get another value of run_env")
    elif kind == 2:
        Host(
            text(rng), rng.choice(["10.0.0.1", text(rng)]), rng.choice(["/data", text(rng)]), "/usr/bin/python3"
        ).check()
        settings = ["netplan_address", "netplan_gateway", "netplan_dns", "netplan_mtu", "netplan_nic"]
        for line in address_errors({"n": {"netplan_address": "10.0.0.1/24"} | {rng.choice(settings): value(rng)}}):
            require_line(line)
    else:
        config = change(rng, rng.choice(CONFIGS))
        raw = dumps(config)
        (folder / "config.json").write_bytes(mutate(rng, raw) if rng.random() < 0.3 else raw)
        spec = make_spec({"model": str(folder)}, "the flags")
        shape = shape_of(spec)
        layer_class(shape.kind)
        require_estimates(spec, shape)
        read_shape(config)


def require_estimates(spec: RunSpec, shape: Any) -> None:
    """Estimate memory and traffic of every strategy for a model's shape."""
    from trainer.costs.cost import Layout, RowStats
    from trainer.strategy import plan_named

    for name in STRATEGIES:
        plan_named(name).memory(spec, shape, Layout((1, 1)), RowStats.full(spec))
        plan_named(name).comm_bytes(spec, shape, Layout((1, 1)), gloo=True)


HOST = Host("h", "127.0.0.1", "/data", "/usr/bin/python3")
NODE = PlanEntry("h", 0, [0], "127.0.0.1", "lo", 1, "/data/runs/r", "/data", ["/usr/bin/python3"])


class Canned:
    """A transport whose host answers every command with the same output."""

    kind = "local"

    def __init__(self, out: bytes) -> None:
        self.out = out

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        return 0, self.out, b"last\nline\x1b[2J"

    def put(self, source: str, target: str) -> None: ...

    def fetch(self, source: str, target: str) -> None: ...


def connection(out: bytes) -> HostConnection:
    """Return a connection to a host that answers with this output."""
    return HostConnection(HOST, Canned(out))


TARGETS: dict[str, Callable[[random.Random, Path], None]] = {
    "spec": fuzz_spec,
    "flags": fuzz_flags,
    "dataset": fuzz_dataset,
    "table": fuzz_table,
    "replies": fuzz_replies,
    "settings": fuzz_settings,
    "runs": lambda rng, folder: fuzz_runs(rng, folder, special_file, connection),
    "verbs": lambda rng, folder: fuzz_verbs(rng, folder, special_file, connection),
}


SLOW = {
    "table": 20,
    "runs": 5,
}  # a process for each input, or a look at all processes: they get this part of the inputs


# Runner ---------------------------------------------------------------------------------------------------------------


def require_line(message: str) -> None:
    """Check that a message is one printable line. Raises Broken."""
    if not message.isprintable() or len(message) > MAX_MESSAGE + 100:
        raise Broken(f"a message is not one short line of printable text: {message[:300]!r}")


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hang in the main thread when the time is over."""

    def expire(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process grow by MEMORY at most: an input that needs more gets a MemoryError, and not the memory of the machine."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def run_target(target: str, count: int, seed: int = SEED) -> Outcome:
    """Give `count` inputs to a target; input i depends on the seed, the target and i alone."""
    outcome = Outcome(target, seed)
    start = time.perf_counter()
    known = functools.cache(extra_vars.known_variables)  # reads all roles, for every input the same
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as base, mock.patch.object(extra_vars, "known_variables", known):
        for number in range(count):
            folder = Path(base, str(number))
            folder.mkdir()
            run_input(outcome, f"{target}:{seed}:{number}", folder)
    outcome.seconds = time.perf_counter() - start
    if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024) > MEMORY:
        outcome.tracebacks.append(f"{target}: the process has grown by {grown >> 20} MiB")
    return outcome


def run_input(outcome: Outcome, label: str, folder: Path) -> None:
    """Give one input to its target, and count what happens."""
    outcome.inputs += 1
    start = time.perf_counter()
    try:
        with alarm(LIMIT), limited_memory():
            TARGETS[outcome.target](random.Random(label), folder)
        outcome.accepted += 1
    except EXPECTED as error:
        outcome.refused += 1
        try:
            require_line(str(error))
        except Broken as broken:
            outcome.tracebacks.append(f"{label}: {broken}")
    except Hang:
        outcome.hangs.append(f"{label}: {''.join(traceback.format_exc().splitlines(keepends=True)[-8:])}")
    except BaseException as error:  # anything else would be a traceback
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome.tracebacks.append(f"{label}: {''.join(traceback.format_exc().splitlines(keepends=True)[-8:])}"[:3000])
    outcome.slowest = max(outcome.slowest, time.perf_counter() - start)


def main(count: int, seed: int) -> int:
    """Run all targets and print their counts, and the first failures of each kind."""
    outcomes = [run_target(target, count // SLOW.get(target, 1), seed) for target in TARGETS]
    for outcome in outcomes:
        print(outcome.line())
        kinds = Counter(failure.strip().splitlines()[-1][:100] for failure in outcome.tracebacks + outcome.hangs)
        for kind, times in kinds.most_common(20):
            print(f"  {times} x {kind!a}")
    failures = [failure for outcome in outcomes for failure in outcome.tracebacks + outcome.hangs]
    for failure in failures[:3]:
        print(failure)
    total = sum(outcome.inputs for outcome in outcomes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{total} inputs, {len(failures)} tracebacks or hangs, {sum(o.seconds for o in outcomes):.1f} s, peak {peak} MiB"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*(numbers + [1000, SEED][len(numbers) :])))
