"""The role dashboard on two hosts with a queue: the service, its address, its password, and its removal."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, VENV, Lab, Played, inventory_with, run_playbook
from outsider import SCAN
from prometheus_client.parser import text_string_to_metric_families
from testbed.root import DATA_DIR, USER

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

PORT, PASSWORD = 5443, "correct horse battery"
FOLDER = f"{DATA_DIR}/dashboard"
LIB = "/usr/local/lib/trainyard/dashboard"
CERTIFICATE = f"{FOLDER}/.trainyard/dashboard/tls.pem"
ROLES = "ssh,firewall,storage,queue,dashboard"
# reset.yml removes the role completely.
LEFT = rf"""
ls -d {FOLDER} /etc/systemd/system/trainyard-dashboard.service /etc/systemd/system/*.wants/trainyard-dashboard.service \
    /usr/local/lib/trainyard /var/lib/trainyard /home/*/.ssh/trainyard_dashboard* /run/trainyard-dashboard 2>/dev/null || :
grep -s "(dashboard)" /home/*/.ssh/authorized_keys || :
ps -e -o args= | grep '[t]rainyard[.]dashboard[.]' || :
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    lab, folder = Lab(f"dashboard-{os.getpid()}"), tmp_path_factory.mktemp("dashboard")
    lab.up(hosts=2, venv=VENV, persistent=False)
    controller = lab.hosts[0].address.rpartition(".")[0] + ".254"  # as the hosts see this machine
    settings = {"dashboard_state": "present", "dashboard_port": PORT, "dashboard_password": PASSWORD}
    yield lab, inventory_with(lab, folder, **settings, dashboard_allow=[controller], queue_state="present")
    lab.down()


@pytest.fixture(scope="module")
def site(cluster: tuple[Lab, Path]) -> Played:
    """The first site.yml, with the roles on which the dashboard depends."""
    played = run_playbook("site.yml", cluster[1], {}, "--diff", "-vv", "--tags", ROLES, timeout=900)
    journal = cluster[0].inside(cluster[0].hosts[0], "journalctl --no-pager -o cat -u trainyard-dashboard | tail -n 40")
    assert played.rc == 0, f"{played.stdout}\n{journal}"
    return played


def ask(lab: Lab, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
    """Send a request from this machine to the service, and trust only its certificate."""
    certificate = lab.inside(lab.hosts[0], f"cat {CERTIFICATE}")
    context = ssl.create_default_context(cadata=certificate[certificate.index("-----BEGIN CERTIFICATE") :])
    connection = http.client.HTTPSConnection(lab.hosts[0].address, PORT, timeout=20, context=context)
    with contextlib.closing(connection):
        connection.request(method, path, body or None, {name.replace("_", "-"): text for name, text in headers.items()})
        reply = connection.getresponse()
        return reply.status, {name.lower(): text for name, text in reply.getheaders()}, reply.read().decode()


def hosts_up(lab: Lab, password: str) -> dict[str, float]:
    """Return which hosts answer the dashboard, as /metrics says."""
    basic = base64.b64encode(f"prometheus:{password}".encode()).decode()
    status, _, text = ask(lab, "GET", "/metrics", Authorization=f"Basic {basic}")
    assert status == 200, text
    families = {one.name: one.samples for one in text_string_to_metric_families(text)}
    return {one.labels["host"]: one.value for one in families["trainyard_host_up"]}


def log_in(lab: Lab) -> dict[str, str]:
    """Return the headers of a session, and of a form, whose token is in `token`."""
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    _, headers, _ = ask(lab, "POST", "/login", f"password={PASSWORD.replace(' ', '+')}", **form)
    return {"Cookie": headers["set-cookie"].partition(";")[0], **form}


def press(lab: Lab, path: str, more: str = "") -> None:
    """Send the form of an action to the service."""
    session = log_in(lab)
    page = ask(lab, "GET", "/runs", **session)[2]
    token = re.search(r'name="csrf" value="(\w+)"', page)
    assert token, page
    status, _, text = ask(lab, "POST", path, f"csrf={token[1]}{more}", **session)
    assert status == 303, text


def shown(lab: Lab, path: str) -> str:
    return ask(lab, "GET", path, **log_in(lab))[2]


def test_check_mode_changes_nothing(cluster: tuple[Lab, Path]) -> None:
    lab, inventory = cluster
    checked = run_playbook("site.yml", inventory, {}, "--tags", "dashboard", "--check")
    assert checked.rc == 0, checked.stdout
    refused = run_playbook("site.yml", inventory, {"dashboard_password": "short"}, "--tags", "dashboard")
    assert refused.rc != 0 and "shorter than 12 characters" in " ".join(refused.stdout.split()), refused.stdout
    for host in lab.hosts:
        assert lab.inside(host, LEFT) == "", host.name


def test_the_service_shows_both_hosts_and_the_queue_over_tls(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, _ = cluster
    lab.wait(lambda: hosts_up(lab, PASSWORD) == {"node1": 1, "node2": 1}, "the hosts are not up", 60)
    assert ask(lab, "GET", "/")[0] == ask(lab, "POST", "/login", "password=not+the+password")[0] == 401
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    status, headers, _ = ask(lab, "POST", "/login", f"password={PASSWORD.replace(' ', '+')}", **form)
    session = headers["set-cookie"].partition(";")[0]
    assert status == 303 and ask(lab, "GET", "/", Cookie=session)[0] == 200
    page = ask(lab, "GET", "/queue", Cookie=session)[2]
    assert "is not installed" not in page
    certificate = lab.inside(lab.hosts[0], f"cat {CERTIFICATE}")
    shown = ssl.PEM_cert_to_DER_cert(certificate[certificate.index("-----BEGIN CERTIFICATE") :])
    digest = hashlib.sha256(shown).hexdigest().upper()
    assert ":".join(digest[at : at + 2] for at in range(0, 64, 2)) in "".join(site.stdout.split())


def test_the_service_is_confined_and_its_port_open_for_named_addresses_only(
    cluster: tuple[Lab, Path], site: Played
) -> None:
    lab, _ = cluster
    head = lab.hosts[0]
    shown = lab.inside(head, "systemctl show -P User -P NoNewPrivileges -P CapabilityBoundingSet trainyard-dashboard")
    assert shown.split() == [USER, "yes"]
    assert lab.inside(lab.hosts[1], "systemctl list-unit-files --no-legend 'trainyard-dash*' || :") == ""
    assert json.loads(lab.in_lab("python3", "-c", SCAN, head.address, json.dumps([22, PORT]))) == [22]
    listening = lab.inside(head, f"ss -Htln 'sport = :{PORT}'").split()
    assert f"{head.address}:{PORT}" in listening and f"0.0.0.0:{PORT}" not in listening
    modes = lab.inside(head, f"cd {FOLDER} && stat -c '%a' . .trainyard/dashboard {CERTIFICATE} password config.json")
    assert modes.split() == ["700", "700", "600", "600", "600"]
    texts = [lab.inside(host, "journalctl --no-pager -o cat; ps -e -o args=") for host in lab.hosts]
    texts += [
        lab.inside(head, f"cat {FOLDER}/password {FOLDER}/config.json"),
        site.stdout,
        json.dumps(site.events),
    ]
    assert [text for text in texts if PASSWORD in text] == []


def long_run(folder: Path, name: str) -> dict[str, Any]:
    """Return a run with a dataset on the controller that does not end by itself."""
    dataset = folder / "questions.jsonl"
    rows = [
        {"instruction": f"What follows {n}?", "input": "", "output": f"After {n} comes {n + 1}."} for n in range(60)
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"run": name, "dataset": str(dataset), "seq_length": 64, "total_batch_size": 4, "max_steps": 100_000}
    return spec | {"epochs": 100_000, "checkpoint_interval": 5, "loggers": "none"}


@contextlib.contextmanager
def open_page(lab: Lab, page: str) -> Iterator[None]:
    """Keep the live connection of a page open, as a browser does: the service asks the queue only then."""
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(lab.hosts[0].address, PORT, timeout=20, context=context)
    with contextlib.closing(connection):
        connection.request("GET", f"/live/{page}", headers={"Cookie": log_in(lab)["Cookie"]})
        assert connection.getresponse().status == 200
        yield


def test_the_service_starts_a_run_of_the_controller_again(
    cluster: tuple[Lab, Path], site: Played, tmp_path: Path
) -> None:
    """The controller no longer has the dataset, and a host has lost it: the service copies it from the other host."""
    lab, inventory = cluster
    spec = long_run(tmp_path, "again")
    more = {"run_env": {"TOKEN": "of the controller"}, "follow": "false"}
    started = run_playbook("train.yml", inventory, spec | more)
    assert started.rc == 0 and "warning: the service" not in started.stdout, started.stdout
    Path(spec["dataset"]).unlink()
    lab.wait(lambda: "Stop after a checkpoint" in shown(lab, "/runs/again"), "the run is not shown", 30)
    saved = f"ls {DATA_DIR}/runs/again/checkpoints/step-*/manifest.json 2>/dev/null || :"
    lab.wait(lambda: lab.inside(lab.hosts[0], saved) != "", "the run saves no checkpoint", 150)
    press(lab, "/runs/again/stop")
    lab.wait(lambda: "Start again" in shown(lab, "/runs/again"), "the run is not stopped", 90)
    lost = lab.inside(lab.hosts[1], f"rm -v {DATA_DIR}/store/datasets/*.jsonl")
    press(lab, "/runs/again/start")
    log = f"cat {DATA_DIR}/runs/again/logs/rank0.log"
    lab.wait(lambda: "resuming from step" in lab.inside(lab.hosts[0], log), "the run is not started again", 120)
    assert "questions" not in lost and lab.inside(lab.hosts[1], f"ls {DATA_DIR}/store/datasets/").strip()
    for host in lab.hosts:
        assert "of the controller" in lab.inside(host, f"cat {DATA_DIR}/runs/again/env")
        assert "of the controller" not in lab.inside(host, "journalctl --no-pager -o cat; ps -e -o args=")
    press(lab, "/runs/again/stop", "&now=1")
    lab.wait(lambda: "Start again" in shown(lab, "/runs/again"), "the run is not stopped", 90)


def test_the_service_adds_a_run_to_the_queue_again(cluster: tuple[Lab, Path], site: Played, tmp_path: Path) -> None:
    lab, inventory = cluster
    added = run_playbook(
        "playbooks/queue.yml", inventory, long_run(tmp_path, "queued") | {"do": "add", "time_limit": 30}
    )
    assert added.rc == 0, added.stdout
    (tmp_path / "questions.jsonl").unlink()
    read = f"cat {DATA_DIR}/runs/queued/logs/rank0.log 2>/dev/null || :"
    logs = lambda: "".join(lab.inside(host, read) for host in lab.hosts)  # noqa: E731
    button = "/queue/queued/again"
    with open_page(lab, "queue"):
        lab.wait(lambda: "tokens/s" in logs(), "the run does not train", 150)
        press(lab, "/queue/queued/cancel")
        lab.wait(lambda: button in shown(lab, "/queue"), "the run has not ended", 120)
        assert button in shown(lab, "/runs/queued")
        press(lab, button)
        lab.wait(lambda: "resuming from step" in logs(), "the run does not resume", 150)
        press(lab, "/queue/queued/cancel")
        lab.wait(lambda: button in shown(lab, "/queue"), "the run has not ended again", 120)


def test_only_the_program_that_was_added_drives_a_queued_run(cluster: tuple[Lab, Path], site: Played) -> None:
    """The run of the test before it: an unpacked program that was edited is replaced, and an edited archive is refused."""
    lab, _ = cluster
    head, folder, button = lab.hosts[0], f"{DATA_DIR}/queue/queued", "/queue/queued/again"
    plant = f"open('{DATA_DIR}/planted', 'w')"
    state = lambda: json.loads(lab.inside(head, f"cat {folder}/state.json"))  # noqa: E731
    (package,) = lab.inside(head, "ls /run/trainyard-queue/*/trainyard/queue/__init__.py").split()
    assert lab.inside(head, f"stat -c %a {package}").strip() == "444"
    lab.inside(head, f'echo "{plant}" >{package}')
    with open_page(lab, "queue"):
        lab.wait(lambda: button in shown(lab, "/queue"), "the run has not ended", 120)
        press(lab, button)
        lab.wait(lambda: state()["phase"] == "running", "the run does not start", 150)
        assert "planted" not in lab.inside(head, f"cat {package}")
        press(lab, "/queue/queued/cancel")
        lab.wait(lambda: state()["phase"] == "cancelled", "the run has not ended", 120)
        ended = f"squeue -h; pgrep -f 'queue[.]driver {folder}' || :"
        lab.wait(lambda: lab.inside(head, ended) == "", "its driver or its job has not ended", 120)
        lab.wait(lambda: button in shown(lab, "/queue"), "the page does not show that the run has ended", 120)
        add = f"import zipfile; zipfile.ZipFile('{folder}/program.zip', 'a').writestr('sitecustomize.py', \"{plant}\")"
        lab.inside(head, f"runuser -u {USER} -- python3 - <<'P'\n{add}\nP")
        press(lab, button)
        lab.wait(lambda: state()["phase"] == "failed", "the run is not refused", 150)
    line = f"run queued: {folder}/program.zip was changed after the run was added: add the run again on the controller"
    assert state()["exit"]["reason"] in line
    journal = lab.inside(head, "journalctl --no-pager -o cat -u trainyard-queue").splitlines()
    assert journal.count(f"error: {line}") == 1
    lab.wait(lambda: lab.inside(head, "squeue -h") == "", "the job of the refused run does not end", 60)
    assert lab.inside(head, f"ls {DATA_DIR}/planted 2>/dev/null || :") == ""


def test_a_program_that_was_edited_does_not_start(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    head = lab.hosts[0]
    (program,) = lab.inside(head, f"ls {LIB}/program-*/trainyard/dashboard/__init__.py").split()
    as_user = f"cd /; runuser -u {USER} -- sh -c 'echo >>{program}; mv {LIB} {LIB}2; find /usr/local/lib/trainyard -writable' 2>&1 || :"
    assert "denied" in (said := lab.inside(head, as_user)) and len(said.splitlines()) == 2, said
    lab.inside(
        head, f"""echo "open('{FOLDER}/planted', 'w')" >>{program}; systemctl kill -s KILL trainyard-dashboard"""
    )
    failed = lambda: lab.inside(head, "systemctl show -P SubState trainyard-dashboard").strip() == "failed"  # noqa: E731
    lab.wait(failed, "the service is not refused", 30)
    journal = lab.inside(head, "journalctl --no-pager -o cat -u trainyard-dashboard").splitlines()
    assert journal.count(f"error: {program} was changed after the program was installed: run site.yml") == 1
    assert lab.inside(head, f"ls {FOLDER}/planted 2>/dev/null || :") == ""
    repaired = run_playbook("site.yml", inventory, {}, "--tags", "dashboard")
    assert repaired.rc == 0 and repaired.count("changed") == 2, repaired.stdout  # the tree, the start
    assert lab.inside(head, f"cat {program}").count("planted") == 0
    lab.wait(lambda: 1 in hosts_up(lab, PASSWORD).values(), "no host is up", 60)


@pytest.mark.long
def test_a_cluster_of_the_version_before_is_converted(cluster: tuple[Lab, Path], site: Played) -> None:
    """Programs in the data folder, and queued runs without a record of their programs."""
    lab, inventory = cluster
    head = lab.hosts[0]
    kept = f"cd {FOLDER} && sha256sum password config.json .trainyard/dashboard/tls.pem; find . -path '*/received/*' -type f | sort | xargs -r sha256sum"
    before = lab.inside(head, kept)
    old = f"{FOLDER}/program-1 {FOLDER}/packages-2-cpython-311 {DATA_DIR}/queue/.programs/3"
    files = f"{FOLDER}/program-1.zip {FOLDER}/requirements.txt {FOLDER}/constraints.txt"
    make = f"mkdir -p {old} && touch {files} {DATA_DIR}/queue/.programs/3/x.py"
    lab.inside(head, f"rm -r {LIB} /var/lib/trainyard/queue/programs; runuser -u {USER} -- sh -c '{make}'")
    checked = run_playbook("site.yml", inventory, {}, "--tags", "queue,dashboard", "--check")
    assert checked.rc == 0, checked.stdout
    assert lab.inside(head, f"ls -d {LIB} /var/lib/trainyard/queue/programs 2>/dev/null || :") == ""
    assert len(lab.inside(head, f"ls -d {old} {files}").split()) == 6
    converted = run_playbook("site.yml", inventory, {}, "--tags", "queue,dashboard")
    assert converted.rc == 0, converted.stdout
    assert lab.inside(head, f"ls -d {old} {files} {DATA_DIR}/queue/.programs 2>/dev/null || :") == ""
    assert lab.inside(head, kept) == before
    recorded = (
        f"sha256sum <{DATA_DIR}/queue/queued/program.zip | cut -c -64 | diff - /var/lib/trainyard/queue/programs/queued"
    )
    lab.inside(head, recorded)
    lab.wait(lambda: 1 in hosts_up(lab, PASSWORD).values(), "no host is up", 60)


def test_the_second_run_changes_nothing_and_another_password_only_the_hash(
    cluster: tuple[Lab, Path], site: Played
) -> None:
    lab, inventory = cluster
    again = run_playbook("site.yml", inventory, {}, "--diff", "--tags", ROLES)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    other = {"dashboard_password": "another long password"}
    changed = run_playbook("site.yml", inventory, other, "--tags", "dashboard")
    assert changed.rc == 0 and changed.count("changed") == 3, changed.stdout  # hash, unit, restart
    lab.wait(lambda: 1 in hosts_up(lab, other["dashboard_password"]).values(), "no host is up", 60)
    assert ask(lab, "POST", "/login", f"password={PASSWORD.replace(' ', '+')}")[0] == 401


def test_reset_leaves_nothing(cluster: tuple[Lab, Path], site: Played) -> None:
    lab, inventory = cluster
    played = run_playbook("playbooks/reset.yml", inventory, timeout=900)
    assert played.rc == 0, played.stdout
    for host in lab.hosts:
        assert lab.inside(host, LEFT) == "", host.name
