"""Two controllers start a run of the same name, 0 to 3 seconds apart: one starts it; the other follows it or refuses."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from run_hosts import Bed, bed
from ssh_server import control_folder, server

from trainer.spec import make_spec
from trainer.supervise.claim import CLAIM_LIMIT, claimed_by_another, consume_claim, write_claim
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError
from trainyard.remote.commit import commit
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection, Login
from trainyard.wire.openssh import LocalTransport, OpenSSHTransport
from trainyard.wire.run_errors import RunError

__all__ = ["bed", "control_folder", "server"]

SPEC_RANK = Path(__file__).parents[1] / "support/spec_rank.py"


def session(
    bed: Bed, number: int, lr: float, login: Login | None, rank: dict[str, str] | None = None, **options: Any
) -> RunSession:
    """A prepared session of controller `number`, with a home of its own. `rank`: variables of spec_rank.py."""
    python = bed.folder / "python"
    if not python.exists():
        python.write_text(
            f'#!/bin/sh\ncase " $* " in *" trainer.launch.torchrun "*) exec {sys.executable} {SPEC_RANK} "$@";; '
            f'*) exec {sys.executable} "$@";; esac\n'
        )
        python.chmod(0o755)
    hosts = [
        Host(f"node{i}", "127.0.0.1", str(bed.folder / f"node{i}"), str(python), backend="process") for i in (1, 2)
    ]
    dataset = bed.folder / "data.jsonl"
    dataset.write_text("".join(json.dumps({"text": f"After {n} comes {n + 1}."}) + "\n" for n in range(20)))
    fields = {"run": "same", "dataset": str(dataset), "lr": lr, "max_steps": 1, "loggers": "none", "seq_length": 32}
    variables = {"LR": str(lr), **(rank or {})}
    chosen = make_options({"progress_interval": 0.2, "run_env": variables, **options})
    home = bed.folder / f"controller{number}"
    spec = make_spec(fields, "the test")

    def connect(host: Host) -> HostConnection:
        return HostConnection(host, OpenSSHTransport(login) if login else LocalTransport())

    made = RunSession(hosts, connect, chosen, spec=spec, home=home, report=lambda line: None)
    made.prepare()
    return made


def run_both(bed: Bed, lrs: tuple[float, float], offset: float, login: Login | None) -> list[Any]:
    """Run two sessions that begin `offset` seconds apart; return the result or the error of each."""
    ends: list[Any] = [None, None]
    sessions = [session(bed, number, lr, login) for number, lr in enumerate(lrs)]

    def drive(number: int) -> None:
        time.sleep(offset * number)
        try:
            ends[number] = sessions[number].run()["result"]
        except RunError as error:
            ends[number] = error

    threads = [threading.Thread(target=drive, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert None not in ends, "a session hangs"
    return ends


OFFSETS = (0.0, 0.1, 0.3, 0.8, 1.5, 3.0)
EVERY_DAY = (("local", 0.1),)  # the other cases are nightly
CASES = [
    pytest.param(*case, marks=[] if case in EVERY_DAY else pytest.mark.long)
    for case in [*(("local", offset) for offset in OFFSETS), ("ssh", 0.0), ("ssh", 0.3)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "offset"), CASES)
def test_different_specs_never_mix(bed: Bed, transport: str, offset: float, request: pytest.FixtureRequest) -> None:
    login = request.getfixturevalue("server").login if transport == "ssh" else None
    lrs = (1e-3, 2e-3)
    ends = run_both(bed, lrs, offset, login)
    winners = [number for number, end in enumerate(ends) if isinstance(end, dict)]
    assert len(winners) == 1, ends
    [winner] = winners
    # Each host has recorded the samples that it trained on.
    for host in (0, 1):
        result = json.loads((bed.run_dir(host, "same") / "result.json").read_text())
        assert result["lrs"] == [lrs[winner]] * 2 and result["lr_env"] == str(lrs[winner])
    refusal = str(ends[1 - winner])
    assert "\n" not in refusal and "run same" in refusal and "lr" in refusal and "another spec" in refusal
    assert not bed.live_processes()


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "offset"), CASES)
def test_the_same_spec_is_followed(bed: Bed, transport: str, offset: float, request: pytest.FixtureRequest) -> None:
    login = request.getfixturevalue("server").login if transport == "ssh" else None
    ends = run_both(bed, (1e-3, 1e-3), offset, login)
    assert all(isinstance(end, dict) and end["lrs"] == [1e-3] * 2 for end in ends), ends
    assert {bed.node(host, "same")["attempt"] for host in (0, 1)} == {1}, "only one of them has started it"
    assert not bed.live_processes()


@pytest.mark.long
def test_the_attempt_of_a_run_that_is_followed_is_known(bed: Bed) -> None:
    """Else a session that follows it would take the restart by another one for its own failed start, and kill the ranks."""
    first, second = (session(bed, number, 1e-3, None, {"SECONDS": "10"}) for number in (0, 1))
    for step in (first.plan, first.preflight, first.stage, first.launch):
        step()
    second.plan()
    assert second.state.phase == "running" and second.state.attempt == first.state.attempt == 1
    assert [entry.attempt for entry in second.state.plan] == [1, 1]
    assert first.follow()["status"] == second.follow()["status"] == "finished"


def stop_run(made: RunSession) -> None:
    """Stop the run of a session as a user does."""
    found = manage_runs("stopped", "same", made.hosts.values(), made.connect_host, LaunchOptions(), lambda line: None)
    assert set(found["hosts"]) == {"node1", "node2"}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["delay", "planned", "staged"])
def test_a_stop_before_a_restart_is_not_lost(bed: Bed, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(bed, 0, 1e-3, None, {"FAILS": "1"}, max_restarts=3, restart_delay=0.2)
    lines: list[str] = []
    name = {"planned": "_make_plan", "staged": "_stage"}.get(moment, "")

    def report(line: str) -> None:
        lines.append(line)
        if line.startswith("restarting in ") and sum(line.startswith("restarting in ") for line in lines) == 1:
            if moment == "delay":
                stop_run(made)
            else:
                step = getattr(made, name)

                def stopped_after(previous: Any = None, **more: Any) -> Any:
                    monkeypatch.setattr(made, name, step)
                    done = step(previous, **more)
                    stop_run(made)
                    return done

                monkeypatch.setattr(made, name, stopped_after)

    made.report = report
    for step in (made.plan, made.preflight, made.stage, made.launch):
        step()
    ended = made.follow()
    assert ended["status"] == made.state.status == "stopped", lines
    assert ended["lines"] == ["run same was stopped: train.yml with the same spec continues it"]
    assert {bed.node(host, "same")["attempt"] for host in (0, 1)} == {1}, "no rank has started again"
    assert not bed.live_processes()


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def request_of(folder: Path, token: str, **more: Any) -> dict[str, Any]:
    (folder / "store").mkdir(exist_ok=True)
    (folder / "store/trainer").write_bytes(b"zip")
    base = {"run_dir": str(folder / "runs/r"), "token": token, "trainer": str(folder / "store/trainer")}
    return (
        base
        | {"contents": {"spec.yml": [0o644, packed(b"a")]}, "previous": None, "stop_wanted": False, "stale": False}
        | more
    )


def test_a_claim_lasts_until_the_start_or_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "runs/r"
    assert len(commit(request_of(tmp_path, "a"))["changed"]) == 2
    assert commit(request_of(tmp_path, "b")) == {"claimed": "another controller is starting the run"}
    assert commit(request_of(tmp_path, "a")) == {"changed": []}
    for token in ("b", ""):
        with pytest.raises(SupervisorError, match="another controller stages run r at the same time"):
            consume_claim(link_free(run_dir), token)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + CLAIM_LIMIT + 1)
    consume_claim(link_free(run_dir), "")
    write_claim(link_free(run_dir), "a")
    monkeypatch.setattr(time, "time", lambda: now)
    assert not claimed_by_another(link_free(run_dir), "b"), "the clock was set back"
    assert commit(request_of(tmp_path, "b", contents={"spec.yml": [0o644, packed(b"b")]}))["changed"]
    with pytest.raises(SupervisorError, match="another controller"):
        consume_claim(link_free(run_dir), "a")
    commit({"run_dir": str(run_dir), "token": "a", "release": True})
    assert claimed_by_another(link_free(run_dir), "a"), "only its own"
    commit({"run_dir": str(run_dir), "token": "b", "release": True})
    assert not claimed_by_another(link_free(run_dir), "a")


def test_a_start_since_the_plan_is_not_overwritten(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs/r"
    (run_dir / "state").mkdir(parents=True)
    (run_dir / "state/node.json").write_text('{"attempt": 1, "started": 5.0, "status": "running"}')
    assert commit(request_of(tmp_path, "a")) == {"claimed": "the run was started since it was planned"}
    assert not (run_dir / "spec.yml").exists()
    (run_dir / "state/stop-wanted").touch()
    late = commit(request_of(tmp_path, "a", previous=[1, 5.0]))
    assert late == {"claimed": "a user stopped the run since it was planned"}
    assert commit(request_of(tmp_path, "a", previous=[1, 5.0], stop_wanted=True))["changed"]
