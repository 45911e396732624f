"""The pure parts of a session: plans over heterogeneous hosts, the restart policy, scripts, digests."""

import base64
import contextlib
import fcntl
import json
import os
import re
import subprocess
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from trainer.records.run_state import RunHistory
from trainer.spec import make_spec
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError, other_runs
from trainer.supervise.start import check_idle
from trainer.supervise.status import list_runs
from trainyard.preflight.host_state import HostState
from trainyard.remote.commit import write_if_changed
from trainyard.remote.digests import Digests
from trainyard.remote.host_facts import staged_bytes
from trainyard.remote.receive import receive
from trainyard.run.follow.restart_policy import RestartPolicy
from trainyard.run.launch.launch_scripts import sbatch, script
from trainyard.run.plan.gather_facts import space_needed
from trainyard.run.plan.make_plan import check_layers, surplus
from trainyard.run.plan.nodes import check_own_gpus, choose_port, environment, head_first, plan_nodes
from trainyard.run.stage.stage_files import packed, plan_file, small_files
from trainyard.run.types import PlanEntry, StagedFile
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PlanError


def host(name: str, gpus: int = 0, processes: int = 0, **facts: Any) -> HostState:
    found = table("run_plan")["host"] | {
        "gpus": [{"name": "A", "memory_mib": 1000}] * gpus,
        "boot_id": name,
        "interface": f"{name}0",
    }
    about = Host(name, f"10.0.0.{len(name)}", data_dir="/d", python="/p", processes=processes)
    return HostState(about, facts=found | {"cpus": 8} | facts)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=8))
def test_ranks_count_over_heterogeneous_hosts(shapes: list[tuple[int, int]]) -> None:
    hosts = [host(f"n{'x' * place}", gpus, processes) for place, (gpus, processes) in enumerate(shapes)]
    nodes = plan_nodes(hosts, run="r", port=29500)
    assert [rank for node in nodes for rank in node.ranks] == list(range(sum(len(node.ranks) for node in nodes)))
    for place, (node, (gpus, processes)) in enumerate(zip(nodes, shapes, strict=True)):
        assert len(node.ranks) == (processes or gpus or 1)
        assert f"--nproc-per-node={len(node.ranks)}" in node.command and f"--node-rank={place}" in node.command
        # The ranks of a single host meet at loopback, which no other machine reaches.
        assert f"--master-addr={hosts[0].address if len(hosts) > 1 else '127.0.0.1'}" in node.command


def test_a_named_head_is_first_and_the_rest_keep_their_order() -> None:
    hosts = [host(name) for name in ("a", "bb", "ccc")]
    assert [one.name for one in head_first(hosts, "bb")] == ["bb", "a", "ccc"]
    assert head_first(hosts, "") == hosts
    with pytest.raises(PlanError, match="head: d is not a host of this run; its hosts are a, bb, ccc"):
        head_first(hosts, "d")


@pytest.mark.parametrize(("strategy", "fields", "refused"), table("run_plan")["strategies_that_gather_on_gpus_need"])
def test_strategies_that_gather_need_a_gpu_for_each_rank(strategy: str, fields: dict[str, Any], refused: bool) -> None:
    spec = make_spec({"model": "m", "strategy": strategy, **fields}, "")
    card = {"name": "A", "uuid": "GPU-00000000-0000-0000-0000-000000000001"}
    other = {"name": "A", "uuid": "GPU-00000000-0000-0000-0000-000000000002"}
    crowded, alone, same, apart = (host("a", processes=2), host("bb"), host("ccc"), host("dddd"))
    crowded.gpus, alone.gpus, same.gpus, apart.gpus = [card], [card], [card], [other]
    for hosts in ([alone], [alone, apart], [host("e", processes=2)]):
        check_own_gpus(hosts, spec)
    for hosts, names in (
        ([crowded], r"a: .* \(2 ranks, 1 GPU\): set cluster_processes=1,"),
        ([alone, same], "bb, ccc: "),
    ):
        with (
            pytest.raises(PlanError, match=f"{names}.*strategy=ddp or pipeline")
            if refused
            else contextlib.nullcontext()
        ):
            check_own_gpus(hosts, spec)


def test_a_cpu_host_uses_the_installed_allocator() -> None:
    path = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    there, none, gpu = plan_nodes(
        [host("a", allocator=path), host("bb"), host("ccc", 1, allocator=path)], run="r", port=1
    )
    assert f"\nLD_PRELOAD={path}\n" in environment(there, {})
    assert "\nLD_PRELOAD=\n" in environment(there, {"LD_PRELOAD": ""})
    assert "LD_PRELOAD" not in environment(none, {}) + environment(gpu, {})


def test_elastic_names_the_host_of_the_store() -> None:
    first, second = plan_nodes([host("a"), host("bb")], run="r", port=29500, attempt=3, elastic=1, restarts=5)
    assert "--nnodes=1:2" in first.command and "--rdzv-id=r-3" in first.command and "--max-restarts=5" in second.command
    assert any("is_host=1" in word for word in first.command) and any("is_host=0" in word for word in second.command)
    assert all("\nTORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in environment(node, {}) for node in (first, second))
    assert "STORE" not in environment(plan_nodes([host("a"), host("bb")], run="r", port=29500)[0], {})
    assert "--local-addr=10.0.0.2" in second.command and not any("--master" in word for word in second.command)


def test_the_space_that_a_host_needs(tmp_path: Path) -> None:
    """Of a restart, nothing is copied, so a disk that the first start has filled suffices."""
    sizes = {"config.json": 5, "model-1.safetensors": 400, "model-2.safetensors": 200}
    model = StagedFile("model", "", "store/models/m-1", dict.fromkeys(sizes, "1"), "2", 605, sizes)
    dataset = StagedFile("dataset", "", "store/datasets/d", {"": "4"}, "4", 10, {"": 10})
    state = HostState(Host("a", "10.0.0.1", str(tmp_path), "/p"))
    assert space_needed([model, dataset], state) == 615
    assert space_needed([replace(model, on_hosts="/srv/m", bytes=0, sha256={})], state) == 0
    folder, file = tmp_path / model.dest, tmp_path / dataset.dest
    for path, size in [(folder / name, size) for name, size in sizes.items()] + [(file, 10)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / "store/models/link").symlink_to(folder)
    assert staged_bytes(link_free(tmp_path / "store/models/link")) == 0
    state.facts = {"staged": {str(path): staged_bytes(link_free(path)) for path in (folder, file)}}
    assert space_needed([model, dataset], state) == 0
    (folder / "model-1.safetensors").unlink()
    state.facts = {"staged": {str(path): staged_bytes(link_free(path)) for path in (folder, file)}}
    assert space_needed([model, dataset], state) == 400


def failure_at(step: int, **more: Any) -> dict[str, Any]:
    cause = {"host": "a", "rank": 0, "kind": "rank", "blocked_by": more.pop("blocked_by", "")}
    return {"cause": cause, "hosts": {"a": {"ranks": {"0": {"step": step}}}}} | more


def test_a_failure_after_progress_counts_as_the_first() -> None:
    policy = RestartPolicy(max_restarts=2, min_nodes=0, delay=1.0)
    waits = []
    for step in (5, 5, 9, 9, 12):
        assert policy.record(failure_at(step), hosts=3) == ""
        waits.append(policy.wait())
    assert waits == [0, 2, 0, 2, 0], "at once after progress"
    assert policy.record(failure_at(12), hosts=3) == ""
    assert policy.record({"msg": "node1 does not answer"}, hosts=3) == "2 consecutive restarts made no progress"
    policy.failures = 100_000  # a host that is off for weeks
    assert policy.wait() == 60


@pytest.mark.parametrize(
    ("failure", "min_nodes", "ends"),
    [
        (failure_at(5, blocked_by="user"), 1, True),
        (failure_at(5, blocked_by="disk"), 0, True),
        (failure_at(5, blocked_by="disk"), 2, False),
        (failure_at(5, blocked_by="disk"), 3, True),
        (failure_at(5, stop_wanted=True), 0, True),
        (failure_at(5), 0, False),
    ],
)
def test_which_failures_end_the_run(failure: dict[str, Any], min_nodes: int, ends: bool) -> None:
    assert bool(RestartPolicy(max_restarts=3, min_nodes=min_nodes, delay=1.0).record(failure, hosts=3)) is ends


NASTY = {"HF_TOKEN": "geheim x='y\" z= $HOME `id`=", "NAME": "a=b="}


def entries(folder: Path) -> list[PlanEntry]:
    """A plan over two hosts whose command prints its environment, with folders that need quoting."""
    plan = []
    for place in (0, 1):
        run_dir = folder / f"data dir {place}/runs/r"
        run_dir.mkdir(parents=True)
        command = ["/usr/bin/env", "python3", "-c", "import os, json; print(json.dumps(dict(os.environ)))", "it's", '"']
        node = PlanEntry(f"node{place}", place, [place], "10.0.0.1", "eth0", 1, str(run_dir), str(run_dir), command)
        (run_dir / "env").write_text(environment(node, NASTY))
        node.gpus = ["A"] * (place + 1)
        plan.append(node)
    return plan


def test_a_script_has_no_secret_and_gives_them_to_the_command(tmp_path: Path) -> None:
    for entry in entries(tmp_path):
        text = script(entry, "r")
        assert "geheim" not in text
        done = subprocess.run(["bash", "-s"], input=text, capture_output=True, text=True, check=True)
        assert NASTY.items() <= json.loads(done.stdout).items()


def test_sbatch_runs_on_each_node_its_own_part(tmp_path: Path) -> None:
    plan = entries(tmp_path)
    text = sbatch(plan, "r")
    assert "geheim" not in text and "#SBATCH --nodelist=node0,node1" in text
    assert "--gpus-per-node" not in text, "the nodes differ"
    assert "#SBATCH --gpus-per-node=2" in sbatch([plan[1], plan[1]], "r")
    # A stand-in for srun runs its command on this machine.
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    for entry in plan:
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": entry.host}
        done = subprocess.run(["bash", "-s"], input=text, capture_output=True, text=True, check=True, env=path)
        assert json.loads(done.stdout)["PWD"] == entry.run_dir
    lost = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "node7"}
    done = subprocess.run(["bash", "-s"], input=text, capture_output=True, text=True, check=False, env=lost)
    assert done.returncode == 2 and "no part of the run is planned for node7" in done.stderr


def test_only_what_holds_of_the_records_counts() -> None:
    starts = table("run_plan")["starts"]
    history = RunHistory(starts)
    holds = [
        (start, step)
        for start in "abcd"
        for step in (5, 10, 11, 30, 31)
        if history.is_valid({"start": start, "step": step})
    ]
    assert holds == [("a", 5), ("a", 10), ("c", 5), ("c", 10), ("c", 11), ("c", 30)]
    assert not history.head_moved and RunHistory(starts[:2]).head_moved and not RunHistory(starts[:1]).head_moved


def test_a_file_is_read_once_and_again_when_it_changed(tmp_path: Path) -> None:
    file, cache = tmp_path / "model", tmp_path / "store/digests.json"
    file.write_bytes(b"one")
    first = Digests(cache)
    one = first.of(file)
    first.keep()
    known = json.loads(cache.read_text())
    known[str(file)][-1] = "remembered"
    cache.write_text(json.dumps(known))
    assert Digests(cache).of(file) == "remembered", "not read again"
    before = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Digests(cache).of(file) not in ("remembered", one), "as long and as old, and another file all the same"
    for damaged in ("{half", json.dumps({str(file): 1.5}), json.dumps({str(file): [], "\0": [1], "x" * 9999: ["y"]})):
        cache.write_text(damaged)
        read = Digests(cache)
        assert len(read.of(file)) == 64
        read.keep()
    assert Digests(cache).of(tmp_path / "none") == ""


def test_receive_requests_missing_files_and_rejects_damaged_ones(tmp_path: Path) -> None:
    target, aside = tmp_path / "store/file", tmp_path / "store/incoming/x"
    wanted = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of "foo"
    question = {"files": {str(target): wanted}, "arrived": {}}
    question |= {"cache": str(tmp_path / "store/digests.json"), "incoming": str(aside.parent), "check": False}
    assert receive(question | {"check": True})["changed"] == [str(target)]
    assert not (tmp_path / "store").exists()
    assert receive(question) == {"lacking": [str(target)]}
    aside.write_text("fox")
    assert "arrived damaged" in receive(question | {"arrived": {str(target): str(aside)}})["error"]
    assert not aside.exists() and not target.exists()
    aside.write_text("foo")
    placed = receive(question | {"arrived": {str(target): str(aside)}})
    assert placed == {"lacking": [], "changed": [str(target)]}
    assert receive(question) == {"lacking": [], "changed": []}


def test_a_small_file_of_a_run_is_written_if_its_content_or_mode_differs(tmp_path: Path) -> None:
    env = link_free(tmp_path / "env")
    assert write_if_changed(env, b"a", 0o600) and not write_if_changed(env, b"a", 0o600)
    # The file may hold secrets, so its mode is corrected although its content is the same.
    (tmp_path / "env").chmod(0o644)
    assert write_if_changed(env, b"a", 0o600) and (tmp_path / "env").stat().st_mode & 0o777 == 0o600


def unreadable_siblings(runs: Path) -> None:
    """Make run folders that cannot be read: a symbolic link to itself, a FIFO as lock, and a broken state."""
    for name in ("fifo", "json", "list"):
        (runs / name / "state").mkdir(parents=True)
    (runs / "loop").symlink_to("loop")
    os.mkfifo(runs / "fifo/lock")
    os.mkfifo(runs / "fifo/state/node.json")
    (runs / "json/state/node.json").write_text("{half")
    (runs / "list/state/node.json").write_text("[1]")


def test_unreadable_siblings_are_skipped_and_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    unreadable_siblings(runs)
    (runs / "r").mkdir()
    assert other_runs(link_free(runs / "r")) == ([], ["fifo", "loop"])
    check_idle(link_free(runs / "r"))
    listed = list_runs({"data_dir": str(tmp_path)})
    assert listed["runs"] == [] and listed["skipped"] == ["fifo", "json", "list", "loop"]
    (runs / "good").mkdir()
    with (runs / "good/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert other_runs(link_free(runs / "r"))[0] == ["good"]
        with pytest.raises(SupervisorError, match="busy: run good is running here"):
            check_idle(link_free(runs / "r"))


@pytest.mark.privileged
def test_a_run_folder_of_another_user_is_skipped() -> None:
    # Every user reaches this folder, unlike `tmp_path`.
    with tempfile.TemporaryDirectory(prefix="trainyard-test-") as name:
        data_dir = Path(name)
        data_dir.chmod(0o755)
        (data_dir / "runs/r").mkdir(parents=True)
        (data_dir / "runs/theirs").mkdir(mode=0)
        os.seteuid(65534)
        try:
            assert other_runs(link_free(data_dir / "runs/r")) == ([], ["theirs"])
            assert list_runs({"data_dir": name})["skipped"] == ["theirs"]
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(("mode", "staged"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o400, 0o600)])
def test_a_private_dataset_stays_private(tmp_path: Path, mode: int, staged: int) -> None:
    """Others may read a staged file only if they may read its source, also if an earlier release staged it."""
    wanted = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of "foo"
    target, aside = tmp_path / "store/file", tmp_path / "store/incoming/x"
    question = {"files": {str(target): wanted}, "arrived": {}, "modes": {str(target): mode}}
    question |= {"cache": str(tmp_path / "store/digests.json"), "incoming": str(aside.parent), "check": False}
    before = os.umask(0o022)
    try:
        assert receive(question) == {"lacking": [str(target)]}
        assert aside.parent.stat().st_mode & 0o777 == 0o700
        aside.write_text("foo")
        receive(question | {"arrived": {str(target): str(aside)}})
        assert target.stat().st_mode & 0o777 == staged
        target.chmod(0o644)
        receive(question)
        assert target.stat().st_mode & 0o777 == staged
        target.unlink()
        both = {str(target): str(aside), f"{target}2": str(aside.with_name("y"))}
        for path in both.values():
            Path(path).write_text("foo")
        files = question["files"] | {f"{target}2": "0" * 64}
        assert "damaged" in receive(question | {"files": files, "arrived": both})["error"]
        assert target.stat().st_mode & 0o777 == staged, "from its arrival on"
        os.umask(0o077)
        assert receive(question | {"files": {f"{tmp_path}/store/new": wanted}, "incoming": f"{tmp_path}/store/in"})
        assert os.umask(0o077) == 0o077, "the umask of the host is not changed"
    finally:
        os.umask(before)


def test_values_of_run_env_are_in_the_private_file_of_the_run_folder_alone() -> None:
    (node,) = plan_nodes([host("a")], run="r", port=29500)
    files = small_files(node, packed(plan_file([node])), make_spec({}, "here"), {"model": "m"}, {"TOKEN": "hunter2"})
    for name, (mode, content) in files.items():
        private = name == "env"
        assert (b"hunter2" in zlib.decompress(base64.b64decode(content))) is private, name
        assert mode == (0o600 if private else 0o644)


def test_hosts_beyond_equal_pipelines_are_left_out() -> None:
    spec = make_spec({"model": "x", "strategy": "diloco", "replica_strategy": "pipeline", "replica_hosts": 2}, "here")
    assert surplus(["a", "b", "c", "d"], spec, 2) == surplus(["a"], spec, 1) == {}
    assert surplus(["a", "b", "c"], spec, 2) == {"c": "every pipeline has 2 hosts"}
    for min_nodes in (0, 3):
        with pytest.raises(PlanError, match="replica_hosts: 3 hosts cannot form pipelines of 2 hosts each: set "):
            surplus(["a", "b", "c"], spec, min_nodes)
    assert surplus(["a", "b", "c"], spec.model_copy(update={"strategy": "ddp"}), 0) == {}
    assert surplus(["a", "b", "c"], spec.model_copy(update={"replica_hosts": 1}), 0) == {}


def test_runs_that_start_together_have_different_ports() -> None:
    """They see the same free ports. The choice for a run is always the same; the queue's jobs take one after the other."""
    free = list(range(29500, 29600))
    chosen = [choose_port(None, free, "head", f"tiny-{number}") for number in range(10)]
    assert len(set(chosen)) > 7 and set(chosen) <= set(free)
    assert chosen == [choose_port(None, free, "head", f"tiny-{number}") for number in range(10)]
    leased = [choose_port(None, free, "head", "r", f"/leases/{job}") for job in range(7, 107)]
    assert len(set(leased)) == len(free)
    assert choose_port(29501, free, "head", "r") == 29501
    with pytest.raises(PlanError, match="port 29501 is in use on the head node1"):
        choose_port(29501, [29500], "node1", "r")
    with pytest.raises(PlanError, match="no port from 29500 to 29599 is free on the head node1"):
        choose_port(None, [], "node1", "r")


@pytest.mark.parametrize(("fields", "processes", "why"), table("run_plan")["layers_that_do_not_suit_the_ranks"])
def test_layers_that_do_not_suit_the_ranks_are_found_in_the_plan(
    fields: dict[str, Any], processes: list[int], why: str, tmp_path: Path
) -> None:
    """Such as after the loss of a host, when `pipeline_layers` has more ranks than are left."""
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    config |= {"vocab_size": 16, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = make_spec({"model": str(tmp_path), "strategy": "pipeline"} | fields, "the test")
    with pytest.raises(PlanError, match=re.escape(why)) if why else contextlib.nullcontext():
        check_layers(spec, processes)


@pytest.mark.parametrize(
    ("gpus", "chosen", "cpus", "threads"),
    [(0, None, (), 16), (4, None, (), 4), (4, ("1",), (), 4), (4, ("1",), (0, 1), 16), (1, None, (), 16)],
)
def test_a_rank_leaves_cores_to_runs_on_other_gpus(
    gpus: int, chosen: tuple[str, ...] | None, cpus: tuple[int, ...], threads: int
) -> None:
    """Unless the queue has granted cores, whose number is then that of the host."""
    one = host("a", gpus, 1 if chosen else 0, cpus=16)
    one.host = replace(one.host, gpus=chosen, cpus=cpus)
    one.gpus = one.facts["gpus"][: 1 if chosen else gpus]
    (node,) = plan_nodes([one], run="r", port=29500)
    assert node.threads == threads
