"""The role queue with the Slurm of the distribution on three hosts, and GPUs that a stand-in for nvidia-smi shows; runs of the queue."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_nvidia_smi import write_nvidia_smi
from lab_hosts import NEEDS_LAB, REPO, VENV, Host, Lab, Played, inventory_with, run_playbook
from outsider import SCAN
from queued_runs import tiny_spec
from run_hosts import questions
from testbed.root import DATA_DIR, USER

from trainyard.cli import __main__ as program

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

KEY = "/etc/munge/munge.key"
# reset.yml removes the role completely.
LEFT = r"""
ls -d /etc/slurm /etc/munge /var/lib/slurm /var/log/slurm /var/lib/munge /var/log/munge /run/munge /run/slurm* \
    /etc/systemd/system/slurm* /etc/systemd/system/trainyard-queue.service /etc/systemd/system/*.wants/trainyard-queue.service \
    /usr/local/lib/trainyard /home/*/.ssh/trainyard_queue* /var/lib/trainyard 2>/dev/null || :
grep -s "trainyard queue\|(queue)" /home/*/.ssh/authorized_keys || :
dpkg-query --show --showformat '${Package} ${db:Status-Status}\n' 'slurm*' 'munge*' 'libmunge*' 2>/dev/null | grep -v not-installed || :
ps -e -o comm= | grep -E '^(slurm|munge)' || :
systemctl list-unit-files --no-legend 'slurm*' 'munge*' || :
"""


FOLDER, LIB = f"{DATA_DIR}/dashboard", "/usr/local/lib/trainyard/dashboard"
# As the role dashboard of an earlier version left it.
FORMER = rf"""
set -e
mkdir -p {LIB} {FOLDER}/.trainyard/received/starts
echo '$argon2id$' >{FOLDER}/password
touch {FOLDER}/config.json {LIB}/verified_tree.py
chown -R {USER}: {DATA_DIR}
cat >/etc/systemd/system/trainyard-dashboard.service <<'U'
[Service]
ExecStart=/usr/bin/sleep infinity
[Install]
WantedBy=multi-user.target
U
systemctl daemon-reload
systemctl enable --now trainyard-dashboard
runuser -u {USER} -- ssh-keygen -q -t ed25519 -N '' -f /home/{USER}/.ssh/trainyard_dashboard_ed25519
runuser -u {USER} -- sh -c 'printf "%s\n" "# BEGIN trainyard: written by site.yml, taken away by playbooks/reset.yml" \
  "restrict ssh-ed25519 AAAA # trainyard:(dashboard)" "# END trainyard" >>/home/{USER}/.ssh/authorized_keys'
"""
LEFT_OF_DASHBOARD = rf"""
ls -d {FOLDER}/* /etc/systemd/system/trainyard-dashboard.service /etc/systemd/system/*.wants/trainyard-dashboard.service {LIB} \
    /home/*/.ssh/trainyard_dashboard* 2>/dev/null || :
grep -s "(dashboard)" /home/*/.ssh/authorized_keys || :
systemctl is-active trainyard-dashboard | grep -x active || :
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ANSIBLE_CONFIG", str(REPO / "ansible.cfg"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    """Three stock hosts and their inventory: node2 has two GPUs of 24 GB, node3 one of 8 GB, node1 none."""
    lab, folder = Lab(f"queue-{os.getpid()}"), tmp_path_factory.mktemp("queue")
    lab.up(hosts=3, venv=VENV, persistent=False)
    for host, count, mib in ((lab.hosts[1], 2, 24576), (lab.hosts[2], 1, 8192)):
        write_nvidia_smi(folder, count)
        program = (folder / "nvidia-smi").read_text().replace("24576", str(mib))
        lab.inside(host, f"cat >/usr/local/bin/nvidia-smi <<'P'\n{program}\nP\nchmod 755 /usr/local/bin/nvidia-smi")
    yield lab, inventory_with(lab, folder, queue_state="present", queue_preempt=["low"], dashboard_state="present")
    lab.down()


@pytest.fixture(scope="module")
def site(cluster: tuple[Lab, Path]) -> Played:
    """The first site.yml, with every role, on a cluster with the service of the dashboard that an earlier version installed."""
    lab, inventory = cluster
    lab.inside(lab.hosts[0], FORMER)
    assert len(lab.inside(lab.hosts[0], LEFT_OF_DASHBOARD).splitlines()) >= 7
    played = run_playbook("site.yml", inventory, {}, "--diff", timeout=900)
    assert played.rc == 0, played.stdout
    return played


def as_user(lab: Lab, host: Host, command: str, check: bool = True) -> str:
    """Run a command as the login user in /tmp, and return its output with its errors."""
    return lab.inside(host, f"cd /tmp; runuser -u {USER} -- sh -c '{command}' 2>&1", check=check).strip()


def nodes(lab: Lab) -> dict[str, str]:
    """Return the state of every host in the queue, as the head sees it."""
    rows = as_user(lab, lab.hosts[0], 'sinfo -h -N -o "%N %T"').splitlines()
    return dict(row.split() for row in rows)


@pytest.mark.long
def test_check_mode_changes_nothing(cluster: tuple[Lab, Path]) -> None:
    lab, inventory = cluster
    checked = run_playbook("site.yml", inventory, {}, "--tags", "queue", "--check")
    assert checked.rc == 0, checked.stdout
    for host in lab.hosts:
        assert lab.inside(host, LEFT) == "", host.name


def test_all_hosts_are_idle_and_run_a_job(cluster: tuple[Lab, Path], site: Played) -> None:
    """`srun -Q`: a job may wait for the Epilog of the one before it."""
    lab, _ = cluster
    assert nodes(lab) == {"node1": "idle", "node2": "idle", "node3": "idle"}
    names = as_user(lab, lab.hosts[0], "srun -Q -N3 hostname").split()
    assert sorted(names) == ["node1", "node2", "node3"]
    # The daemons of the other hosts have no file: they fetch the configuration, and clients find it.
    assert lab.inside(lab.hosts[2], "ls /etc/slurm/*.conf 2>/dev/null || :").split() in (
        [],
        ["/etc/slurm/plugstack.conf"],
    )
    assert as_user(lab, lab.hosts[2], "srun -Q -w node2 hostname") == "node2"
    assert "Gres=gpu:standingpu:2,vram:24" in as_user(lab, lab.hosts[0], "scontrol show node node2")


def test_gpu_memory_selects_the_host_or_refuses(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, _ = cluster
    head = lab.hosts[0]
    assert as_user(lab, head, "srun -Q --gres=gpu:1,vram:16 hostname") == "node2"
    assert as_user(lab, head, "srun -Q --gres=gpu:1,vram:8 -x node2 hostname") == "node3"
    for wanted in ("gpu:1,vram:25", "gpu:3"):
        began = time.monotonic()
        refused = as_user(lab, head, f"srun --gres={wanted} hostname", check=False)
        assert "Requested node configuration is not available" in refused and time.monotonic() - began < 5, refused
    # Two runs with one GPU each share the host, on different GPUs.
    both = 'srun -Q --exact -N1 -w node2 --gres=gpu:1 sh -c "echo \\$CUDA_VISIBLE_DEVICES; sleep 3"'
    assert sorted(as_user(lab, head, f"{both} & {both} & wait").split()) == ["0", "1"]


def test_critical_preempts_low_which_is_repeated(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, _ = cluster
    head = lab.hosts[0]
    script = '#!/bin/sh\ntrap "exit 75" TERM\ntouch /tmp/low.started\nsleep 300 & wait\n'
    lab.inside(head, f"cat >/tmp/low.sh <<'P'\n{script}\nP\nchmod 755 /tmp/low.sh")
    job = as_user(
        lab, head, "sbatch --parsable -p low -N1 -w node3 --exclusive --signal=B:TERM@30 -o /dev/null /tmp/low.sh"
    )
    state = f"squeue -h -j {job} -o %T"
    # The job runs for Slurm before its script does. A script that a signal ends before its trap has failed: it is not repeated.
    started = "test -e /tmp/low.started && echo started || :"
    lab.wait(lambda: lab.inside(lab.hosts[2], started) != "", "the low job does not start")
    assert as_user(lab, head, "srun -p critical -w node3 --exclusive hostname").splitlines()[-1] == "node3"
    lab.wait(lambda: as_user(lab, head, state) == "RUNNING", "the low job is not repeated", 60)
    assert "Restarts=1" in as_user(lab, head, f"scontrol show job {job}")
    as_user(lab, head, f"scancel {job}")


def test_the_second_run_changes_nothing_and_the_key_stays_secret(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    # `molecule test` runs the other roles twice.
    again = run_playbook("site.yml", inventory, {}, "--diff", "--tags", "queue", timeout=900)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    keys = {lab.inside(host, f"base64 -w0 {KEY}") for host in lab.hosts}
    modes = {lab.inside(host, f"stat -c '%U %a' {KEY}").strip() for host in lab.hosts}
    assert len(keys) == 1 and modes <= {"munge 400", "munge 600"}  # Debian creates it with 600
    key = keys.pop()
    for text in (site.stdout, again.stdout, *(lab.inside(host, "journalctl --no-pager -o cat") for host in lab.hosts)):
        assert key not in text and key[:40] not in text
    assert key not in json.dumps([*site.events, *again.events])


def test_an_outsider_reaches_only_ssh(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, _ = cluster
    for host in lab.hosts:
        listening = {int(port) for port in lab.inside(host, "ss -Htln | awk '{print $4}' | sed 's/.*://'").split()}
        assert 6818 in listening and (6817 in listening) == (host.name == "node1")
        ports = json.dumps(sorted(listening | {6817, 6818, 60001}))
        assert json.loads(lab.in_lab("python3", "-c", SCAN, host.address, ports)) == [22]


def test_the_former_service_of_the_dashboard_is_removed_and_said(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    text = " ".join(site.stdout.split())
    assert text.count("the service of the dashboard and its password are removed from node1") == 1
    for host in lab.hosts:
        assert lab.inside(host, LEFT_OF_DASHBOARD) == "", host.name
    again = run_playbook("site.yml", inventory, {}, "--tags", "dashboard")
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    assert " ".join(again.stdout.split()).count("dashboard_state has no effect any more") == 1, again.stdout


def phase(lab: Lab, run: str) -> str:
    text = lab.inside(lab.hosts[0], f"cat {DATA_DIR}/queue/{run}/state.json 2>/dev/null || echo '{{}}'")
    return str(json.loads(text).get("phase", ""))


def change(cluster: tuple[Lab, Path], verb: str, wanted: str, **more: object) -> None:
    lab, inventory = cluster
    played = run_playbook("playbooks/queue.yml", inventory, {"do": verb, "run": "queued", **more})
    assert played.rc == 0, played.stdout
    lab.wait(lambda: phase(lab, "queued") == wanted, f"the run is not {wanted}", 150)


def test_a_queued_run_trains_and_is_cancelled(cluster: tuple[Lab, Path], site: Played, tmp_path: Path) -> None:
    spec = tiny_spec("queued", questions(tmp_path, 600), 100_000)
    change(cluster, "add", "running", **spec, time_limit=30, cores=1)
    change(cluster, "cancel", "cancelled")


def trainyard(inventory: Path, *words: str, code: int = 0, command: str = "queue") -> dict[str, Any]:
    """Call `trainyard COMMAND ... --json` in this process, which saves its imports, and return its answer."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = program.main([command, *words, "--json", "-i", str(inventory)])
    assert found == code, err.getvalue()
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def listed(inventory: Path) -> dict[str, dict[str, Any]]:
    return {run["run"]: run for run in trainyard(inventory, "list")["runs"]}


def test_a_sweep_is_added_listed_and_changed(cluster: tuple[Lab, Path], site: Played) -> None:
    """The service that drives the runs is stopped, so that a job keeps its hosts and nothing trains."""
    lab, inventory = cluster
    lab.inside(lab.hosts[0], "systemctl stop trainyard-queue.service")
    sweep = REPO / "tests/data/lab_sweep.yml"
    added = run_playbook("playbooks/queue.yml", inventory, {"do": "add", "file": str(sweep)})
    assert added.rc == 0, added.stdout
    text = " ".join(added.stdout.split())
    assert "added run busy, priority normal, 1 host; time limit 30 minutes (job" in text
    assert (
        "added run next, priority normal, 1 host after busy; time limit 10 minutes: twice the plan's estimate" in text
    )

    lab.wait(lambda: listed(inventory)["busy"]["state"] == "running", "the run does not start", 60)
    runs = listed(inventory)
    assert set(runs) == {"busy", "wants", "next", "last", "grid-lr1e-4", "grid-lr3e-4"} and runs["busy"]["hosts"] == [
        "node2"
    ]
    waits = ("starts soon", "waits for free hosts", "waits for runs that come first")
    assert runs["grid-lr1e-4"]["reason"] in waits, runs
    assert runs["next"]["reason"] == "waits for the end of busy"
    assert runs["last"]["reason"] == "waits for the end of grid-lr1e-4, grid-lr3e-4"
    again = trainyard(inventory, "add", f"--file={sweep}")
    assert not again["changed"] and {run["state"] for run in again["runs"]} == {"running", "waiting"}

    # The files of the runs share the store, and what may hold secrets is private.
    folder = f"{DATA_DIR}/queue"
    assert lab.inside(lab.hosts[0], f"stat -c %a {folder}/busy/session.json").strip() == "600"
    models = " ".join(f"{folder}/{run}/files/store/models/*/model.safetensors" for run in runs)
    inodes = lab.inside(lab.hosts[0], f"stat -c %i {models}").split()
    assert len(inodes) >= 5 and len(set(inodes)) == 1

    assert trainyard(inventory, "hold", "wants")["changed"]
    assert not trainyard(inventory, "hold", "wants")["changed"]
    assert listed(inventory)["wants"]["reason"] == "is held: release it with trainyard queue release wants"
    trainyard(inventory, "release", "wants")
    moved = run_playbook("playbooks/queue.yml", inventory, {"do": "priority", "run": "wants", "priority": "critical"})
    assert moved.rc == 0 and moved.count("changed") == 1, moved.stdout
    found = listed(inventory)["wants"]
    assert (found["priority"], found["state"]) == ("critical", "waiting")
    cancelled = trainyard(inventory, "cancel", "busy", "grid-lr3e-4")
    assert cancelled["changed"] and "run busy, which is running, cancelled" in cancelled["lines"]
    lab.wait(lambda: listed(inventory)["wants"]["state"] == "running", "the critical run does not start", 60)
    lab.wait(lambda: not {"next", "last"} & set(listed(inventory)), "the runs after a cancelled one do not end", 60)
    ended = "JobState=CANCELLED Reason=DependencyNeverSatisfied"
    assert ended in lab.inside(lab.hosts[0], f"scontrol --oneliner show job {runs['next']['job']}")


def test_slurm_that_does_not_answer_is_one_line(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    lab.inside(lab.hosts[0], "systemctl stop slurmctld")
    try:
        error = trainyard(inventory, "list", code=1)["error"]
    finally:
        lab.inside(lab.hosts[0], "systemctl start slurmctld")
    assert error.startswith("queue host node1: squeue: ") and "\n" not in error
    lab.wait(lambda: "UP" in as_user(lab, lab.hosts[0], "scontrol ping", check=False), "slurmctld does not start", 60)
    assert "wants" in listed(inventory)
    lab.inside(lab.hosts[0], f"scancel --user={USER}")
    lab.wait(lambda: lab.inside(lab.hosts[0], "squeue -h") == "", "the jobs do not end", 120)


@pytest.mark.long
def test_the_queue_moves_to_another_host(cluster: tuple[Lab, Path], site: Played, tmp_path: Path) -> None:
    lab, inventory = cluster
    document = yaml.safe_load(inventory.read_text())
    document["all"]["children"]["queue"] = {"hosts": {"node2": None}}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    moved = run_playbook("site.yml", tmp_path / "inventory.yml", {}, "--tags", "queue")
    assert moved.rc == 0, moved.stdout
    assert set(nodes(lab).values()) == {"idle"}
    running = [host.name for host in lab.hosts if lab.inside(host, "pgrep -x slurmctld || :")]
    assert running == ["node2"]
    again = run_playbook("site.yml", tmp_path / "inventory.yml", {}, "--tags", "queue")
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


def test_reset_leaves_nothing(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    played = run_playbook("playbooks/reset.yml", inventory, timeout=900)
    assert played.rc == 0, played.stdout
    for host in lab.hosts:
        assert lab.inside(host, LEFT) == "", host.name
