"""The program that drives a queued run is the one that was added; and site.yml removes the former service of the dashboard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_trial import questions
from lab_hosts import NEEDS_LAB, VENV, Lab, Played, inventory_with, run_playbook
from queued_runs import tiny_spec
from testbed.root import DATA_DIR, USER

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

FOLDER, LIB = f"{DATA_DIR}/dashboard", "/usr/local/lib/trainyard/dashboard"
ROLES = "ssh,firewall,storage,queue,dashboard"
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
LEFT = rf"""
ls -d {FOLDER}/* /etc/systemd/system/trainyard-dashboard.service /etc/systemd/system/*.wants/trainyard-dashboard.service {LIB} \
    /home/*/.ssh/trainyard_dashboard* 2>/dev/null || :
grep -s "(dashboard)" /home/*/.ssh/authorized_keys || :
systemctl is-active trainyard-dashboard | grep -x active || :
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    lab, folder = Lab(f"programs-{os.getpid()}"), tmp_path_factory.mktemp("programs")
    lab.up(hosts=2, venv=VENV, persistent=False)
    yield lab, inventory_with(lab, folder, queue_state="present", dashboard_state="present")
    lab.down()


@pytest.fixture(scope="module")
def site(cluster: tuple[Lab, Path]) -> Played:
    """The first site.yml of this version, on a cluster with the service."""
    lab, inventory = cluster
    lab.inside(lab.hosts[0], FORMER)
    assert len(lab.inside(lab.hosts[0], LEFT).splitlines()) >= 7
    played = run_playbook("site.yml", inventory, {}, "--tags", ROLES, timeout=900)
    assert played.rc == 0, played.stdout
    return played


def test_the_former_service_of_the_dashboard_is_removed_and_said(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    text = " ".join(site.stdout.split())
    assert text.count("the service of the dashboard and its password are removed from node1") == 1
    for host in lab.hosts:
        assert lab.inside(host, LEFT) == "", host.name
    again = run_playbook("site.yml", inventory, {}, "--tags", "dashboard")
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    assert " ".join(again.stdout.split()).count("dashboard_state has no effect any more") == 1, again.stdout


def test_only_the_program_that_was_added_drives_a_queued_run(
    cluster: tuple[Lab, Path], site: Played, tmp_path: Path
) -> None:
    """An unpacked program that was edited is replaced, and an edited archive is refused."""
    lab, inventory = cluster
    head, folder = lab.hosts[0], f"{DATA_DIR}/queue/queued"
    plant = f"open('{DATA_DIR}/planted', 'w')"
    state = lambda: json.loads(lab.inside(head, f"cat {folder}/state.json 2>/dev/null || echo '{{}}'")).get("phase")  # noqa: E731

    def change(verb: str, **more: object) -> None:
        played = run_playbook("playbooks/queue.yml", inventory, {"do": verb, "run": "queued", **more})
        assert played.rc == 0, played.stdout

    change("add", **tiny_spec("queued", questions(tmp_path), 100_000), time_limit=30)
    lab.wait(lambda: state() == "running", "the run does not start", 150)
    change("cancel")
    lab.wait(lambda: state() == "cancelled", "the run has not ended", 120)
    (package,) = lab.inside(head, "ls /run/trainyard-queue/*/trainyard/queue/__init__.py").split()
    assert lab.inside(head, f"stat -c %a {package}").strip() == "444"
    lab.inside(head, f'echo "{plant}" >{package}')
    change("again")
    lab.wait(lambda: state() == "running", "the run does not start again", 150)
    assert "planted" not in lab.inside(head, f"cat {package}")
    change("cancel")
    lab.wait(lambda: state() == "cancelled", "the run has not ended again", 120)
    ended = f"squeue -h; pgrep -f 'queue[.]driver {folder}' || :"
    lab.wait(lambda: lab.inside(head, ended) == "", "its driver or its job has not ended", 120)
    add = f"import zipfile; zipfile.ZipFile('{folder}/program.zip', 'a').writestr('sitecustomize.py', \"{plant}\")"
    lab.inside(head, f"runuser -u {USER} -- python3 - <<'P'\n{add}\nP")
    change("again")
    lab.wait(lambda: state() == "failed", "the run is not refused", 150)
    line = f"run queued: {folder}/program.zip was changed after the run was added: add the run again on the controller"
    journal = lab.inside(head, "journalctl --no-pager -o cat -u trainyard-queue").splitlines()
    assert journal.count(f"error: {line}") == 1
    lab.wait(lambda: lab.inside(head, "squeue -h") == "", "the job of the refused run does not end", 60)
    assert lab.inside(head, f"ls {DATA_DIR}/planted 2>/dev/null || :") == ""


@pytest.mark.long
def test_a_queue_of_the_version_before_gets_records_of_its_programs(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    head, old = lab.hosts[0], f"{DATA_DIR}/queue/.programs/3"
    make = f"mkdir -p {old} && touch {old}/x.py"
    lab.inside(head, f"rm -r /var/lib/trainyard/queue/programs; runuser -u {USER} -- sh -c '{make}'")
    converted = run_playbook("site.yml", inventory, {}, "--tags", "queue")
    assert converted.rc == 0, converted.stdout
    assert lab.inside(head, f"ls -d {old} 2>/dev/null || :") == ""
    recorded = (
        f"sha256sum <{DATA_DIR}/queue/queued/program.zip | cut -c -64 | diff - /var/lib/trainyard/queue/programs/queued"
    )
    lab.inside(head, recorded)
