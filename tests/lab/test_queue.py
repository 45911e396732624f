"""The role queue with the Slurm of the distribution on three hosts, and GPUs that a stand-in for nvidia-smi shows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_nvidia_smi import write_nvidia_smi
from lab_hosts import NEEDS_LAB, VENV, Host, Lab, Played, inventory_with, run_playbook
from outsider import SCAN
from testbed.root import USER

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    """Three stock hosts and their inventory: node2 has two GPUs of 24 GB, node3 one of 8 GB, node1 none."""
    lab, folder = Lab(f"queue-{os.getpid()}"), tmp_path_factory.mktemp("queue")
    lab.up(hosts=3, venv=VENV, persistent=False)
    for host, count, mib in ((lab.hosts[1], 2, 24576), (lab.hosts[2], 1, 8192)):
        write_nvidia_smi(folder, count)
        program = (folder / "nvidia-smi").read_text().replace("24576", str(mib))
        lab.inside(host, f"cat >/usr/local/bin/nvidia-smi <<'P'\n{program}\nP\nchmod 755 /usr/local/bin/nvidia-smi")
    yield lab, inventory_with(lab, folder, queue_state="present", queue_preempt=["low"])
    lab.down()


@pytest.fixture(scope="module")
def site(cluster: tuple[Lab, Path]) -> Played:
    """The first site.yml, with every role."""
    played = run_playbook("site.yml", cluster[1], {}, "--diff", timeout=900)
    assert played.rc == 0, played.stdout
    return played


def as_user(lab: Lab, host: Host, command: str, check: bool = True) -> str:
    """Run a command as the login user in /tmp, and return its output with its errors."""
    return lab.inside(host, f"cd /tmp; runuser -u {USER} -- sh -c '{command}' 2>&1", check=check).strip()


def nodes(lab: Lab) -> dict[str, str]:
    """Return the state of every host in the queue, as the head sees it."""
    rows = as_user(lab, lab.hosts[0], 'sinfo -h -N -o "%N %T"').splitlines()
    return dict(row.split() for row in rows)


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
    again = run_playbook("site.yml", inventory, {}, "--diff", timeout=900)
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
