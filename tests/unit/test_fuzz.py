"""Hostile specs, flags, datasets, replies, settings and run folders, given to the functions that read them.

Every input is accepted or refused with an error of the project, whose message is one printable line, within limits of time and memory.
Inputs are valid examples with mutations, so that they pass the first checks of a parser.
"""

import asyncio
import contextlib
import functools
import gzip
import importlib
import io
import json
import os
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lying_host
import pytest
import yaml
from hostile import LIMIT, NUMBERS, TEXTS, VALUES, changed, dumps, limits, mutated, spelled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import table

from trainer import __main__ as command_line
from trainer.common.errors import UserError
from trainer.config import FIELDS
from trainer.config.dataset_source import COLUMNS
from trainer.costs.cost import Layout, RowStats
from trainer.data.samples import check_source, read_samples, read_source, source_of
from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.model_files.model_shape import layer_class, read_shape, shape_of
from trainer.records.checkpoint import find_defect
from trainer.spec import make_spec, read_spec
from trainer.strategy import STRATEGIES, plan_named
from trainer.supervise.claim import claimed_by_another
from trainer.supervise.environment import run_environment
from trainer.supervise.link_free import LinkFreePath, link_free
from trainer.supervise.run_files import SupervisorError
from trainer.supervise.start import check_idle
from trainyard import extra_vars
from trainyard.dashboard.records import RunRecords
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import _parse
from trainyard.discovery import ollama_replies as replies
from trainyard.provision.addresses import address_errors
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
from trainyard.run.launch_options import OPTIONS, make_options, options_from_variables
from trainyard.run.plan.nodes import environment
from trainyard.run.prepare.spec_files import dataset_file
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host, HostConnection, InventoryError, RemoteError
from trainyard.wire.replies import ReplyError, checked_reply
from trainyard.wire.run_errors import RunError

TOP = Path(__file__).resolve().parents[2]
EXPECTED = (UserError, RunError, RemoteError, InventoryError, OllamaError, ReplyError, SupervisorError)
HOST = Host("h", "127.0.0.1", "/data", "/usr/bin/python3")
NODE = PlanEntry("h", 0, [0], "127.0.0.1", "lo", 1, "/data/runs/r", "/data", ["/usr/bin/python3"])
EXAMPLES = table("fuzz_examples")
VALID = st.sampled_from(list(EXAMPLES["valid"].items()))
YAML_PARTS = spelled(EXAMPLES["yaml_parts"]) + [
    "\n".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9) if n else 'x'}]" for n in range(9)),
    "\n".join(f"unknown{n}: 1" for n in range(3000)),
]
Draw = Callable[[st.SearchStrategy[Any]], Any]


def pick(draw: Draw, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def often(draw: Draw, tenths: int) -> bool:
    """Return true in about this many of ten inputs."""
    return draw(st.integers(0, 9)) < tenths


def maybe_mutated(draw: Draw, data: bytes, tenths: int) -> bytes:
    return draw(mutated(data)) if often(draw, tenths) else data


def connection(out: bytes) -> HostConnection:
    """Return a connection to a host that answers every command with this output."""
    answer = lambda command, stdin=None: (0, out, b"last\nline\x1b[2J")  # noqa: E731
    return HostConnection(HOST, SimpleNamespace(kind="local", execute=answer))  # type: ignore[arg-type]


def require_line(message: str) -> None:
    assert message.isprintable() and len(message) <= 2100, message[:300]


def fuzz_spec(draw: Draw, folder: Path) -> None:
    """Read a YAML file as a run spec; an accepted spec survives a round trip."""
    data, kind = pick(draw, *EXAMPLES["specs"]), draw(st.integers(0, 4))
    if kind == 0:
        value = draw(TEXTS | st.sampled_from(YAML_PARTS) | st.sampled_from([str(n) for n in NUMBERS[:7]]))
        data += f"{pick(draw, *FIELDS)}: {value}\n"
    elif kind == 1:
        mapping = draw(st.dictionaries(st.sampled_from(list(FIELDS)) | TEXTS, VALUES, min_size=1, max_size=3))
        with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
            data = yaml.safe_dump(mapping)
    elif kind == 2:
        data = f"{data}{pick(draw, *YAML_PARTS)}\n"
    elif kind == 4:
        entries = dict(draw(st.lists(VALID, max_size=3)))
        data += "".join(f"{name}: {json.dumps(entry)}\n" for name, entry in entries.items() if name in FIELDS)
    file, raw = folder / "spec.yml", data.encode(errors="replace")
    file.write_bytes(draw(mutated(raw)) if kind == 3 else raw)
    spec = read_spec(file, {}, "the flags").named()
    file.write_text(spec.to_yaml())
    assert read_spec(file, {}, "the flags") == spec
    spec.digest()


def variables(draw: Draw) -> dict[str, Any]:
    """Return valid values of settings by name, and in most cases a hostile one."""
    values = dict(draw(st.lists(VALID, max_size=3)))
    if often(draw, 7):
        values[draw(st.sampled_from([*FIELDS, *OPTIONS]) | TEXTS)] = draw(VALUES)
    return values


def fuzz_flags(draw: Draw, folder: Path) -> None:
    """Read hostile -e values, or run a command of the trainer that only reads, with hostile flags."""
    if often(draw, 4):
        plain = extra_vars.plain_data(variables(draw))
        options_from_variables(plain, lambda content: content)
        extra_vars.read_run_spec(str(plain.get("spec") or ""), plain, TOP)
        return
    argv = [pick(draw, "check", "check", "plan", "config")]
    argv += [draw(st.sampled_from(["deepspeed", "fsdp", "accelerate", "slurm"]) | TEXTS)] if argv == ["config"] else []
    argv += ["--no-measure", f"--data-dir={folder}"] if argv == ["plan"] else []
    for name, content in variables(draw).items():
        shown = content if isinstance(content, str) else dumps(content).decode()
        if name not in OPTIONS or often(draw, 1):
            argv.append(pick(draw, *[f"--{name}={shown}"] * 3, f"{name}={shown}", f"--{name}", shown))
    argv += [f"{flag}={draw(TEXTS)}" for flag in ("--hosts", "--head", "--link-mbit", "--data-dir") if often(draw, 1)]
    argv = [word.replace("\0", "").encode(errors="ignore").decode() for word in argv if word not in ("--help", "-h")]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line.main(argv)
    for line in err.getvalue().split("\n")[:-1]:
        require_line(line)
    if code:
        raise UserError(err.getvalue().strip())


SUFFIXES = (".jsonl", ".jsonl", ".json", ".json", ".jsonl.gz", ".txt", ".csv", ".tsv", ".parquet", ".arrow", "")
DAMAGED = (b"instruction,output\na,b\n", b'{"a":' * 2000, b"[" * 50_000, b"9" * 5000)


def fuzz_dataset(draw: Draw, folder: Path) -> None:
    """Check a dataset file, or a path without one."""
    if often(draw, 1):
        path = special_file(draw, folder)
        dataset_file(make_spec({"dataset": str(path)}, "the flags"))
        read_samples(path)
        return
    records = draw(st.lists(st.sampled_from(EXAMPLES["records"]), min_size=1, max_size=3))
    records = [draw(changed(record)) if often(draw, 4) else record for record in records]
    suffix = pick(draw, *SUFFIXES)
    data = dumps(records) if suffix == ".json" else b"\n".join(map(dumps, records))
    if often(draw, 4):
        data = draw(mutated(pick(draw, data, *DAMAGED)))
    if suffix.endswith(".gz"):
        data = maybe_mutated(draw, gzip.compress(data), 2)
    path = folder / f"data{suffix}"
    path.write_bytes(data)
    columns = {pick(draw, *COLUMNS): pick(draw, "a", "text", "messages", "prompt", "output")}
    (source,) = make_spec({"dataset": str(path), "columns": columns if often(draw, 2) else {}}, "the flags").sources
    for sample in read_source(source):
        for part in [*(message["content"] for message in sample.messages), *(piece for piece, _ in sample.pieces)]:
            part.encode()


def fuzz_table(draw: Draw, folder: Path) -> None:
    """Check a Parquet or Arrow file, or a saved dataset, with changed values or bytes."""
    import pyarrow
    from pyarrow import parquet

    rows = 60_000 if often(draw, 1) else draw(st.integers(0, 5))
    numbers = pyarrow.array([0] * rows, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(numbers, ["x" * pick(draw, 3, 9000)])
    content = pyarrow.table({pick(draw, "text", "text", "messages", "a"): texts})
    path = folder / pick(draw, "a.parquet", "a.arrow", "saved/a.arrow")
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(content, path, store_schema=draw(st.booleans()))
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(content)
    path.write_bytes(maybe_mutated(draw, path.read_bytes(), 6))
    if path.parent != folder:
        name = draw(st.sampled_from(["a.arrow", "a.arrow", "../a.arrow"]) | TEXTS)
        state = {"_data_files": [{"filename": name}], "_split": "train"}
        (path.parent / "state.json").write_bytes(dumps(draw(changed(state)) if often(draw, 5) else state))
        (path.parent / "dataset_info.json").write_bytes(dumps(draw(st.just({}) | VALUES)))
        path = path.parent
    check_source(source_of(path))


def special_file(draw: Draw, folder: Path) -> Path:
    """Return a path that exists as something else than a file, or that cannot exist."""
    path, kind = folder / "special.jsonl", draw(st.integers(0, 7))
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(pick(draw, "/dev/zero", "/dev/full", "/dev/tty", "/proc/self/mem", "/proc/kmsg", str(path)))
    elif kind == 2:
        with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.bind(str(path))
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        return Path(pick(draw, "~nosuchuser/x", "x" * 300, "d/" * 2500 + "x", "/dev/stdin", "/proc/self/fd/0"))
    elif kind == 5:
        path.write_bytes(b"")
        path.chmod(0)
    else:
        return Path(draw(TEXTS) or ".")
    return path


HEADS = (b"1.1 200 OK\r\nContent-Length: %d", b"1.0 200 OK", b"1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x")


def fuzz_replies(draw: Draw, folder: Path) -> None:
    """Parse replies of discovered servers, read over a socket, and of hosts."""
    if draw(st.booleans()):
        answer = pick(draw, {"error": "text"}, {"changed": [], "facts": {"cpus": 2}}, {"lacking": ["a"]})
        connection(maybe_mutated(draw, b"noise\n" + dumps(draw(changed(answer))) + b"\n", 5)).run("true")
        return
    told = pick(draw, EXAMPLES["models"], {"version": "0.12.3"})
    body = dumps(draw(changed(told))) if draw(st.booleans()) else draw(mutated(dumps(told)))
    head = b"HTTP/" + pick(draw, *HEADS)
    head = head % len(body) if b"%" in head else head
    chunked = b"chunked" in head
    reply = head + (b"\r\n" if chunked else b"\r\n\r\n") + body + (b"\r\n0\r\n\r\n" if chunked else b"")
    reply = maybe_mutated(draw, reply, 4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = OllamaClient(f"http://127.0.0.1:{server.getsockname()[1]}", deadline=1.0)

        def answer_it() -> None:
            with server.accept()[0] as accepted, contextlib.suppress(OSError):
                accepted.settimeout(LIMIT)
                accepted.sendall(reply[:100_000])
                accepted.shutdown(socket.SHUT_WR)
                while accepted.recv(1 << 16):
                    pass

        answering = threading.Thread(target=answer_it)
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


def fuzz_settings(draw: Draw, folder: Path) -> None:
    """Read launch options, environment variables, addresses of an inventory, and a model's config.json."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        make_options(
            draw(st.dictionaries(st.sampled_from(list(OPTIONS)) | TEXTS, VALUES, min_size=1, max_size=3)), "-e"
        )
    elif kind == 1:
        names = st.sampled_from(["TOKEN", "HF_HOME", "A"]) | TEXTS
        wanted = make_options({"run_env": {draw(names): draw(TEXTS | VALUES)}}, "-e").run_env
        file = folder / "env"
        file.touch(mode=0o600)
        file.write_bytes(environment(NODE, wanted).encode())
        found = run_environment(link_free(folder))
        assert {name: found[name] for name in wanted} == wanted
    elif kind == 2:
        address, data = draw(st.just("10.0.0.1") | TEXTS), draw(st.just("/data") | TEXTS)
        Host(draw(TEXTS), address, data, "/usr/bin/python3").check()
        name = f"netplan_{pick(draw, 'address', 'gateway', 'dns', 'mtu', 'nic')}"
        for line in address_errors({"n": {"netplan_address": "10.0.0.1/24"} | {name: draw(VALUES)}}):
            require_line(line)
    else:
        config = draw(changed(pick(draw, *EXAMPLES["configs"])))
        (folder / "config.json").write_bytes(maybe_mutated(draw, dumps(config), 3))
        spec = make_spec({"model": str(folder)}, "the flags")
        shape = shape_of(spec)
        layer_class(shape.kind)
        for strategy in STRATEGIES:
            plan_named(strategy).memory(spec, shape, Layout((1, 1)), RowStats.full(spec))
            plan_named(strategy).comm_bytes(spec, shape, Layout((1, 1)), gloo=True)
        read_shape(config)


STEP = "checkpoints/step-00000005"
# Of the run r on a host, and of the project folder of its controller.
FILES: dict[str, Any] = {
    "runs/r/state/node.json": lying_host.node(0),
    "runs/r/state/rank0.json": lying_host.heartbeat(0),
    "runs/r/claim.json": {"token": "t", "time": lying_host.NOW},
    "runs/r/result.json": lying_host.RESULT,
    f"runs/r/{STEP}/state.pt": "tensor",
    **{name.format(step=STEP): content for name, content in EXAMPLES["run_files"].items()},
}
LARGE = (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000_000, b"\n" * 3_000_000)


def write_folder(draw: Draw, folder: Path) -> None:
    """Write the files of a run, one to three of them hostile: other JSON, damaged bytes, no file, or none at all."""
    hostile = draw(st.lists(st.sampled_from(list(FILES)), min_size=1, max_size=3))
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = draw(st.integers(0, 7)) if name in hostile else 8
        if kind == 0 and not name.startswith(".trainyard"):  # what the user of the controller has written
            special = special_file(draw, path.parent)
            if special.parent == path.parent:  # else it is a path of this machine: root would move /etc/passwd
                with contextlib.suppress(OSError, ValueError):
                    special.rename(path)
        elif kind == 1:
            path.write_bytes(pick(draw, *LARGE))
        elif kind > 2:
            data = dumps(draw(changed(content)) if kind < 6 else content)
            path.write_bytes(draw(mutated(data)) if 5 < kind < 8 else data + b"\n")


def fuzz_runs(draw: Draw, folder: Path) -> None:
    """Let each side read a hostile run folder: verbs of the host, the sampler, and the controller that gets their answers."""
    write_folder(draw, folder)
    run_dir, kind = folder / "runs/r", draw(st.integers(0, 3))
    if kind == 0:  # what no verb alone returns
        for read in (run_state, check_idle, functools.partial(claimed_by_another, token="t")):
            with contextlib.suppress(SupervisorError, OSError, ValueError):
                read(LinkFreePath(run_dir.parent, run_dir.name))
        find_defect(run_dir / STEP)
        digests = Digests(folder / "store/digests.json")
        digests.of(run_dir / STEP / "state.pt")
        digests.keep()
        read_start(folder, "r")
    elif kind == 1:
        show_samples(folder)
    else:
        verb, request = pick(draw, *EXAMPLES["verb_requests"])
        module, name, _ = VERBS[verb]
        request = {"run_dir": str(run_dir), "folder": str(run_dir), "data_dir": str(folder), **request}
        try:
            answer = getattr(importlib.import_module(module), name)(request)
        except (SupervisorError, OSError, ValueError) as error:  # as the entry point of the archive does
            answer = {"error": " ".join(str(error).split())}
        show(verb, connection(b"noise\n" + json.dumps(answer).encode() + b"\n").run("true", verb=verb))


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
    log = {"file": "rank0.log"}
    for query, more in (("describe", {}), ("log", log | {"since": -3}), ("search", log | {"text": "a"})):
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


ASKED = ("host_facts", "health", "hardware", "mesh", "run_status", "run_stop", "run_list", "checkpoints", "read_files")


def fuzz_verbs(draw: Draw, folder: Path) -> None:
    """Take a hostile reply of a host to any verb."""
    verb = pick(draw, *ASKED)
    request = {"peers": {"n": "127.0.0.1"}, "ports": [1], "text": ["result.json", "plan.json"], "paths": ["/a"]}
    out = dumps(draw(changed(lying_host.honest(verb, request, HOST, 0))))
    show(verb, connection(maybe_mutated(draw, out, 3)).run("true", verb=verb))


def show(verb: str, answer: dict[str, Any]) -> None:
    """Use a checked reply as the controller does."""
    if verb == "run_list":
        for state in valid_runs(answer["runs"])[0]:
            status_rows("h", state)
    elif verb == "run_status":
        status_rows("h", answer)
        for cause in causes([HostRun("h", "/data/runs/r", 0, [0], answer=answer)], 10.0):
            assert str(cause)
    elif verb == "read_files" and (result := parse_result("h", answer["text"].get("result.json"))):
        summary("r", result, PlanEntry("h", run_dir="/r"), 1, HostConnection(Host("h", "::1", "/d", "p"), None), None)


TARGETS = (fuzz_spec, fuzz_flags, fuzz_dataset, fuzz_table, fuzz_replies, fuzz_settings, fuzz_runs, fuzz_verbs)
SLOW = {fuzz_table: 20, fuzz_runs: 5}  # a process for each input, or a look at all processes: this part of the inputs


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No input reaches the network; the variables of all roles are read once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(extra_vars, "known_variables", functools.cache(extra_vars.known_variables))
    yield


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_hostile_inputs_are_accepted_or_refused_with_one_line(
    target: Callable[[Draw, Path], None], count: int, tmp_path: Path
) -> None:
    seen, count = Counter[str](), count // SLOW.get(target, 1)

    @settings(max_examples=count, derandomize=count <= 200, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            try:
                with limits():
                    target(data.draw, Path(folder))
                seen["accepted"] += 1
            except EXPECTED as error:
                seen["refused"] += 1
                require_line(str(error))

    attempt()
    assert seen["accepted"] > count // 50, "the inputs reach past the first check"
    assert seen["refused"] >= count // 5 or target is fuzz_runs, "a record that cannot be read counts as none"
