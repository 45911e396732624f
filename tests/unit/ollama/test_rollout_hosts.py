"""Which Ollama servers of an inventory write completions of a run, and how the run reaches them."""

import pytest
from fake_teacher import Teacher, serve
from run_hosts import free_port

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.spec import make_spec
from trainyard.ollama.rollout_hosts import with_rollout_servers
from trainyard.ollama.teachers import Candidate
from trainyard.preflight.host_state import HostState
from trainyard.run.launch.start_ranks import start_request
from trainyard.run.plan.make_plan import check_running_spec
from trainyard.run.plan.rollout_plan import plan_servers
from trainyard.run.types import PlanEntry, PreparedRun
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PlanError


def make(servers: str, **fields: object) -> RunSpec:
    return make_spec({"method": "grpo", "reward": "exact", "rollout_servers": servers} | fields, "test")


def test_servers_of_the_inventory_replace_cluster_and_all() -> None:
    teachers = [Teacher("127.0.0.1", free_port(), version=each) for each in ("0.5.4", "0.9.3", "0.30.1", "0.31.0")]
    with serve(*teachers):
        machines = [
            *(Candidate(f"host{n}", teacher.url, n != 3) for n, teacher in enumerate(teachers)),
            Candidate("off", f"http://127.0.0.1:{free_port()}", True),
        ]
        lines: list[str] = []
        found = with_rollout_servers(make("cluster"), lambda: machines, lines.append)
        assert "connection refused at 127.0.0.1 port " in lines.pop(1)
        assert found.rollout_servers == (teachers[0].url, teachers[2].url)
        assert lines == [
            "host1 writes no completions: Ollama 0.9.3 runs no adapters: update it to 0.30 or later",
            "completions are written by host0, host2, too",
        ]
        every = with_rollout_servers(make("all", rollout_model="teacher"), lambda: machines, lines.append)
        assert every.rollout_servers == (teachers[0].url, teachers[2].url, teachers[3].url)
        with pytest.raises(UserError, match=r"no Ollama server that can write .*: host0: it has no model other"):
            with_rollout_servers(make("cluster", rollout_model="other"), lambda: machines, lines.append)
    given = make("http://10.0.0.5:11434")
    assert with_rollout_servers(given, lambda: pytest.fail("no question"), lines.append) is given
    with pytest.raises(UserError, match="no Ollama server that can write completions: start Ollama there"):
        with_rollout_servers(make("cluster"), list, lines.append)


def test_a_run_that_runs_is_followed_although_other_servers_answer_now() -> None:
    """A server that the controller has found may be off, or another one on, when the same command is given again."""
    begun, now = make("http://10.0.0.5:11434,http://10.0.0.6:11434"), make("http://10.0.0.5:11434")
    head = HostState(Host("node1", "10.0.0.1", "/data", "/python"), facts={"spec": begun.to_yaml()})
    check_running_spec(head, PreparedRun(now, [], {}, servers_found=True), "/data", now)
    with pytest.raises(PlanError, match="rollout_servers: is "):
        check_running_spec(head, PreparedRun(now, [], {}), "/data", now)
    with pytest.raises(PlanError, match="lr: is "):
        other = now.model_copy(update={"lr": 1.0})
        check_running_spec(head, PreparedRun(other, [], {}, servers_found=True), "/data", other)


def test_the_first_host_alone_reaches_the_servers() -> None:
    entries = [
        PlanEntry("a", peers=["10.0.0.1", "10.0.0.2"], isolated=True),
        PlanEntry("b", isolated=True, peers=["10.0.0.1"]),
    ]
    spec = make("http://10.0.0.7:11434,http://[fe80::1%25eth0]:11434,http://10.0.0.8:11434,http://no.such.invalid:1")
    [line] = plan_servers(spec, entries)
    assert line == (
        "completions: written by the ranks and 10.0.0.7:11434, [fe80::1%25eth0]:11434, 10.0.0.8:11434, no.such.invalid:1; at most 1 "
        "step old (max_staleness)"
    )
    reached = [start_request(entry, ["a", "b"], [])["reachable"] for entry in entries]
    assert reached[0][:3] == ["10.0.0.1", "10.0.0.2", "10.0.0.7"] and "10.0.0.8" in reached[0]
    assert reached[1] == ["10.0.0.1"]
    assert plan_servers(make_spec({}, "test"), entries) == []
    assert plan_servers(make("http://10.0.0.7:11434", rollout_ranks=False, max_staleness=0), entries)[0].startswith(
        "completions: written by 10.0.0.7:11434; never old"
    )
    with pytest.raises(UserError, match="rollout_servers: cluster finds servers"):
        plan_servers(make("cluster"), entries)
