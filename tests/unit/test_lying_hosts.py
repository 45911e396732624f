"""Hosts that lie: every operation ends in bounded time with a result or a one-line error, and writes only where it should."""

import itertools
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lying_host import FILES, NONSENSE, RESULT, RUN, Cluster, check_line, encode, honest, lies, lying, outside, slowly
from tables import table

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.deploy.converter import SHA256 as CONVERTER
from trainyard.deploy.deploy_options import make_deploy_options
from trainyard.deploy.deployment import Deployment
from trainyard.preflight.runner import run_preflight
from trainyard.run.follow import follower
from trainyard.run.follow.artifacts import collect_artifacts
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch.start_ranks import start_ranks
from trainyard.run.launch_options import make_options
from trainyard.run.plan import make_plan as planning
from trainyard.run.plan.gather_facts import describe
from trainyard.run.plan.make_plan import plan_run
from trainyard.run.prepare.host_files import HostAccess, describe_files
from trainyard.run.stage.stage_files import stage_files
from trainyard.run.types import PreparedRun, StagedFile
from trainyard.wire import copy_files
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.copy_files import EDIT_LIMIT
from trainyard.wire.host_relay import Copy, Member, run_relay
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError

OPTIONS = make_options({"lost_limit": 2.0, "stall_limit": 1.0, "progress_interval": 0})
SPEC = make_spec({"run": RUN, "model": "tiny", "fake_data": True}, "the test")
PREPARED = PreparedRun(SPEC, [StagedFile("trainer", os.devnull, "store/t.zip", {"": "0" * 64}, "0" * 64, 1)], {})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def collect(cluster: Cluster, folder: Path) -> list[str]:
    return collect_artifacts(cluster.entries(), cluster.connect, str(folder / "out"))["lines"]


def listed(cluster: Cluster, folder: Path) -> list[str]:
    return manage_runs("listed", "", cluster.hosts, cluster.connect, OPTIONS, print)["lines"]


def hardware(cluster: Cluster, folder: Path) -> list[str]:
    return manage_runs("listed", "", cluster.hosts, cluster.connect, OPTIONS, print, hardware=True)["lines"]


def stopped(cluster: Cluster, folder: Path) -> list[str]:
    return manage_runs("stopped", RUN, cluster.hosts, cluster.connect, OPTIONS, print, now=True)["lines"]


def followed(cluster: Cluster, folder: Path) -> list[str]:
    lines: list[str] = []
    try:
        manage_runs("followed", RUN, cluster.hosts, cluster.connect, OPTIONS, lines.append)
    except RunError as error:
        for line in [*lines, *error.details.get("lines", [])]:
            check_line(line)
        raise
    return lines


def stage(cluster: Cluster, folder: Path) -> list[str]:
    entries = cluster.entries()
    return [
        line
        for paths in stage_files(entries, SPEC, PREPARED, cluster.connect, {}, "t", transfer="auto").values()
        for line in paths
    ]


def described(cluster: Cluster, folder: Path) -> list[str]:
    try:
        found = describe_files(HostAccess(cluster.hosts, cluster.connect), {"model": "/srv/model"})["model"]
    except UserError as error:
        raise RunError(str(error)) from None
    return [found.entry("model").dest]


def relayed(cluster: Cluster, folder: Path) -> list[str]:
    copies = {"store/x": Copy("store/x", os.devnull, 5, "0" * 64, 0o644)}
    members = [Member(h.name, h.address, h.data_dir, frozenset(copies)) for h in cluster.hosts]
    if failed := run_relay(members, copies, cluster.connect, "t"):
        raise RunError("; ".join(f"{host}: {why}" for host, why in failed.items()))
    return []


def launch(cluster: Cluster, folder: Path) -> list[str]:
    lines: list[str] = []
    start_ranks(cluster.entries(), cluster.connect, lines.append)
    return lines


def plan(cluster: Cluster, folder: Path) -> list[str]:
    return plan_run([describe(host) for host in cluster.hosts], cluster.connect, PREPARED, OPTIONS).lines


def preflight(cluster: Cluster, folder: Path) -> list[str]:
    return run_preflight(cluster.hosts, cluster.connect, 29500).lines


def deployment(cluster: Cluster, folder: Path, **more: Any) -> Deployment:
    """Return a deployment whose template and converter are on the controller."""
    work = folder / "out" / RUN
    (work / "deploy").mkdir(parents=True, exist_ok=True)
    (work / "deploy" / f"converter-{CONVERTER[:16]}.zip").write_bytes(b"zip")
    (work / "template").write_text("{{ .Prompt }}")
    options = make_deploy_options({"run": RUN, "deploy_name": "m", "template": str(work / "template")} | more)
    urls = {host.name: ["http://127.0.0.1:1"] for host in cluster.hosts}
    return Deployment(cluster.hosts, cluster.connect, urls, options, work=work, report=check_line)


def deployed(cluster: Cluster, folder: Path, **more: Any) -> list[str]:
    try:
        return [str(line) for line in deployment(cluster, folder, **more).deploy()["lines"]]
    except (UserError, RemoteError) as error:
        raise RunError(str(error)) from None


def deployed_adapter(cluster: Cluster, folder: Path) -> list[str]:
    return deployed(cluster, folder, deploy_base="base")


def undeployed(cluster: Cluster, folder: Path) -> list[str]:
    return [str(line) for line in deployment(cluster, folder).remove()["lines"]]


OPERATIONS: dict[str, tuple[Callable[[Cluster, Path], list[str]], str]] = {
    "collect": (collect, "read_files"),
    "status": (listed, "run_list"),
    "status-hardware": (hardware, "hardware"),
    "stop": (stopped, "run_status"),
    "stop-answer": (stopped, "run_stop"),
    "stage": (stage, "receive"),
    "commit": (stage, "commit"),
    "describe-files": (described, "local_files"),
    "relay": (relayed, "relay"),
    "launch": (launch, "run_start"),
    "begin": (launch, "begin"),
    "gather": (plan, "host_facts"),
    "preflight-facts": (preflight, "host_facts"),
    "preflight-health": (preflight, "health"),
    "preflight-mesh": (preflight, "mesh"),
    "deploy-run": (deployed, "read_files"),
    "deploy-export": (deployed, "gguf_export"),
    "deploy-files": (deployed, "receive"),
    "deploy-state": (deployed_adapter, "ollama_state"),
    "deploy-prepare": (deployed, "ollama_prepare"),
    "deploy-create": (deployed, "ollama_create"),
    "undeploy": (undeployed, "ollama_remove"),
}


def attempt(operation: Callable[[Cluster, Path], list[str]], cluster: Cluster, folder: Path, context: object) -> str:
    """Carry out an operation; check what it prints, and that it is fast; return its error or an empty string."""
    start, error = time.monotonic(), ""
    try:
        for line in operation(cluster, folder):
            check_line(line)
    except RunError as raised:
        error = str(raised)
        check_line(error)
        for line in raised.details.get("lines", []):
            check_line(line)
        # A spec that a host claims to have is compared like any other.
        assert "node" in error or error.startswith("run r exists with another spec"), (error, context)
    assert time.monotonic() - start < 10, context
    return error


@pytest.mark.parametrize("name", OPERATIONS)
def test_honest_hosts_are_believed(name: str, cluster: Cluster, tmp_path: Path) -> None:
    assert attempt(OPERATIONS[name][0], cluster, tmp_path, "the truth") == ""


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("liar", ["node1", "node2"])
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 97], ids=["all", "some"])
def test_no_value_breaks_an_operation(name: str, liar: str, stride: int, cluster: Cluster, tmp_path: Path) -> None:
    """Every value of an answer is replaced by every hostile one, or removed; `some` tries every 97th of these."""
    operation, verb = OPERATIONS[name]
    transport = cluster.transports[liar]
    host = transport.host
    mesh_request = {"peers": {h.name: h.address for h in cluster.hosts if h is not host}, "ports": [29500]}
    truth = honest(
        verb,
        {"text": ["result.json", "spec.yml"], "sha256": [], "files": {"a": "0"}} | mesh_request,
        host,
        transport.number,
    )
    for answer in itertools.islice(lies(truth), 0, None, stride):
        transport.lie = lying(verb, encode(answer))
        attempt(operation, cluster, tmp_path, answer)
    assert outside(tmp_path) == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_nonsense_is_a_one_line_error(name: str, cluster: Cluster, tmp_path: Path) -> None:
    operation, verb = OPERATIONS[name]
    for kind, output in NONSENSE.items():
        cluster.transports["node2"].lie = lying(verb, output)
        error = attempt(operation, cluster, tmp_path, kind)
        assert error == "" or "node2" in error, (kind, error)
    assert outside(tmp_path) == []


RESULT_LIES = [{name: value for name, value in answer.items() if name != "run"} for answer in lies(RESULT)]


def test_lies_in_result_json(cluster: Cluster, tmp_path: Path) -> None:
    for value in [*RESULT_LIES[::5], {"run": "../../escaped"}, {"run": "/tmp/escaped"}]:
        text = encode(RESULT | value).decode()

        def lie(verb: str, request: Any, truth: Any, text: str = text) -> Any:
            return truth | {"text": {"result.json": text}} if verb == "read_files" else truth

        for transport in cluster.transports.values():
            transport.lie = lie
        attempt(collect, cluster, tmp_path, value)
    assert outside(tmp_path) == []


def test_hosts_that_ended_with_different_weights_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    other = encode(RESULT | {"adapter_sha256": "1" * 64}).decode()
    cluster.transports["node2"].lie = lambda verb, request, truth: (
        truth | {"text": {"result.json": other}} if verb == "read_files" else truth
    )
    with pytest.raises(RunError, match=r"different weights \(adapter_sha256: node1 0{12}, node2 1{12}\): do not use"):
        collect(cluster, tmp_path)


NAMES = table("lying_hosts")["names"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_artifact_has_is_refused(name: str, cluster: Cluster, tmp_path: Path) -> None:
    def lie(verb: str, request: Any, truth: Any) -> Any:
        if verb != "read_files" or not request.get("sha256"):
            return truth
        return truth | {"sha256": {name: "0" * 64}, "sizes": {name: 1}}

    cluster.transports["node1"].lie = lie
    with pytest.raises(RunError, match=r"^node1: sent a name that no artifact has: ") as error:
        collect(cluster, tmp_path)
    check_line(str(error.value))
    assert outside(tmp_path) == []


def test_artifacts_are_copied_below_the_name_of_the_plan(cluster: Cluster, tmp_path: Path) -> None:
    assert "run r finished" in collect(cluster, tmp_path)[0]
    copied = {str(p.relative_to(tmp_path / "out/r")) for p in (tmp_path / "out/r").rglob("*") if p.is_file()}
    assert copied == set(FILES)
    assert outside(tmp_path) == []


def test_the_summary_names_hosts_that_nothing_protects(cluster: Cluster) -> None:
    entries = cluster.entries()
    assert "ports" not in "\n".join(collect_artifacts(entries, cluster.connect)["lines"])
    entries[-1].exposed = True
    lines = "\n".join(collect_artifacts(entries, cluster.connect)["lines"])
    assert f"  warning      nothing kept other machines from the ports of the run on {entries[-1].host}" in lines


def test_the_copy_of_an_adapter_names_the_base_model_of_the_controller(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's path means nothing here. A second copy changes nothing."""
    name, text = "adapter/adapter_config.json", b'{"base_model_name_or_path": "/host/store/models/m-1", "r": 8}'
    monkeypatch.setitem(FILES, name, text)
    head = cluster.transports["node1"]

    def copy() -> bool:
        head.content[name] = FILES[name]
        done = collect_artifacts(cluster.entries(), cluster.connect, str(tmp_path / "out"), "org/model")
        return bool(done["changed"])

    assert copy()
    assert json.loads((tmp_path / "out/r" / name).read_text()) == {"base_model_name_or_path": "org/model", "r": 8}
    assert not copy()
    monkeypatch.setitem(FILES, name, text.replace(b"8", b"16"))
    assert copy()
    assert json.loads((tmp_path / "out/r" / name).read_text())["r"] == 16
    monkeypatch.setitem(FILES, name, text + b" " * EDIT_LIMIT)
    with pytest.raises(RunError, match=r"^node1: .*adapter_config.json has more than 1 MiB"):
        copy()
    for hostile in (b"[1]", b"{", b"[" * 10_000, b"\xff\xfe"):
        monkeypatch.setitem(FILES, name, hostile)
        with pytest.raises(RunError, match=r"^node1: sent a"):
            copy()


def test_the_base_model_of_the_controller() -> None:
    model = StagedFile("model", "/here/m", "store/models/m", {}, "", 1)
    for name, entry, expected in (
        ("org/model", model, "org/model"),
        ("./m", model, "/here/m"),
        ("tiny", model, "/here/m"),
        ("host:/m", replace(model, src=""), ""),
    ):
        assert PreparedRun(SPEC, [entry], {"model": name}).base_model == expected


def test_a_symbolic_link_in_the_target_is_not_followed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/r").mkdir(parents=True)
    (tmp_path / "out/r/adapter").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"out/r/adapter is a symbolic link: remove it"):
        collect(cluster, tmp_path)
    (tmp_path / "out/r/adapter").unlink()
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "out/r/result.json").symlink_to(tmp_path / "secret")
    collect(cluster, tmp_path)
    assert (tmp_path / "secret").read_text() == "kept" and not (tmp_path / "out/r/result.json").is_symlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_sizes_and_contents_are_checked(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = cluster.transports["node1"]
    name = "adapter/adapter_model.safetensors"
    transport.content[name] = b"forgery"
    with pytest.raises(RunError, match=r"^node1: .*arrived damaged"):
        collect(cluster, tmp_path)
    transport.content[name] = b"x" * 1000
    with pytest.raises(RunError, match=r"^node1: .*larger than the host said"):
        collect(cluster, tmp_path)

    def endless(source: str, target: str) -> None:
        with Path(target).open("wb") as file:
            for _ in range(2000):
                file.write(b"x" * 1024)
                file.flush()
                time.sleep(0.001)

    monkeypatch.setattr(transport, "fetch", endless)
    with pytest.raises(RunError, match=r"^node1: .*larger than the host said"):
        collect(cluster, tmp_path)
    monkeypatch.setattr(transport, "fetch", lambda source, target: time.sleep(3))
    monkeypatch.setattr(copy_files, "PATIENCE", 0.2)
    with pytest.raises(RunError, match=r"^node1: .*arrives too slowly"):
        collect(cluster, tmp_path)
    transport.lie = lambda verb, request, truth: truth | {"sizes": dict.fromkeys(FILES, 2**52)}
    transport.asked.clear()
    with pytest.raises(RunError, match=r"^node1: .*free disk space"):
        collect(cluster, tmp_path)
    assert not [request for _, request in transport.asked if "sha256" in request], "the host reads a file of any size"
    assert outside(tmp_path) == []


def test_a_host_delivers_the_logs_of_its_own_ranks_only(cluster: Cluster, tmp_path: Path) -> None:
    """node2 claims the logs of rank 0, which is on node1."""
    put: list[str] = []
    cluster.transports["node1"].put = lambda source, target: put.append(Path(target).name)  # type: ignore[method-assign]

    def lie(verb: str, request: Any, truth: Any) -> Any:
        claimed = {"state/rank0.json": 1, "state/rank1.json": 1, "logs/rank0.log": 99, "logs/rank1.log": 5, "logs/x": 1}
        return truth | {"sizes": truth["sizes"] | claimed} if verb == "read_files" else truth

    cluster.transports["node2"].lie = lie
    cluster.transports["node1"].lie = lambda verb, request, truth: (
        truth | {"sizes": {"state/rank0.json": 1}} if verb == "read_files" and "text" in request else truth
    )
    collect(cluster, tmp_path)
    assert sorted(put) == ["rank1.log", "torchrun.1.log"]


LONG = {"type": "\x1b[2J", "message": "\x1b[2Ja\nb" * 1000, "traceback": "\x1b[1m\n" * 10**4}
FOLLOWED = [*table("lying_hosts")["followed"], {"ranks": {"1": {"error": LONG}}}]


@pytest.mark.parametrize("lie", FOLLOWED, ids=str)
def test_lies_while_a_run_is_followed(
    lie: dict[str, Any], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TICK": 0.01, "POLL": 0.02, "SETTLE": 0.1, "EVIDENCE_LIMIT": 1.0}.items():
        monkeypatch.setattr(follower, name, value)
    asked = {"node1": 0, "node2": 0}

    def answer(name: str) -> Callable[..., Any]:
        def status(verb: str, request: Any, truth: Any) -> Any:
            if verb != "run_status":
                return truth
            asked[name] += 1
            state = truth | {"node": truth["node"] | {"failures": []}}
            state["ranks"] = {rank: beat | {"error": None} for rank, beat in state["ranks"].items()}
            return state | lie if name == "node2" and asked[name] > 1 else state

        return status

    for name, transport in cluster.transports.items():
        transport.lie = answer(name)
    assert attempt(followed, cluster, tmp_path, lie), "it stalls or fails"


@pytest.mark.slow
def test_a_host_that_answers_too_late_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.transports["node2"].lie = slowly(3.0)
    lines = listed(cluster, tmp_path)
    assert any("node2" in line and "unreachable" in line for line in lines)


def test_endless_output_is_cut_off(tmp_path: Path) -> None:
    """Over a real process: memory stays bounded, and the process is killed."""
    connection = HostConnection(Host("node1", "127.0.0.1", str(tmp_path), "python3"), LocalTransport())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command in ("exec cat /dev/zero", "exec yes '{\"a\": 1}'", "exec yes >&2"):
        start = time.monotonic()
        with pytest.raises(RemoteError, match="sent more than 16 MiB"):
            connection.run(command)
        assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


def test_a_slow_drip_ends_with_the_limit(tmp_path: Path) -> None:
    connection = HostConnection(Host("node1", "127.0.0.1", str(tmp_path), "python3"), LocalTransport())
    drip = FanOut({"node1": lambda: connection.run("while :; do echo x; sleep 0.05; done")}).wait(0.5)
    assert drip.errors == {"node1": "no answer within 0 s"} or "no answer within" in drip.errors["node1"]
    connection.transport.abort()
    drip.threads["node1"].join(5)
    assert not drip.threads["node1"].is_alive()


def test_the_plan_of_a_finished_run_says_that_it_has_ended(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [describe(host) for host in cluster.hosts]
    before = plan_run(states, cluster.connect, PREPARED, OPTIONS, preview=True).lines
    monkeypatch.setattr(planning, "is_finished", lambda *_: True)
    shown = plan_run(states, cluster.connect, PREPARED, OPTIONS, preview=True)
    assert (
        shown.phase == "finished"
        and shown.lines[1:] == before
        and "is finished and will not start again" in shown.lines[0]
        and len(before) > 3
    )
    started = plan_run(states, cluster.connect, PREPARED, OPTIONS)
    assert (started.phase, started.lines) == ("finished", []), "train.yml says that there is nothing to do"
