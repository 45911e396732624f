"""The properties of the systemd unit of a run."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from trainer.supervise import sandbox
from trainer.supervise.environment import clean_environment
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError
from trainer.supervise.start import start_unit
from trainer.supervise.start_request import StartRequest
from trainyard.remote import apart
from trainyard.remote.digests import sha256_file
from trainyard.run.launch.start_ranks import paths_in, start_request
from trainyard.run.types import PlanEntry


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    user = pwd.getpwuid(os.getuid())
    entry = pwd.struct_passwd((*user[:5], str(tmp_path / "a home"), user[6]))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    (tmp_path / "a home/trainyard/runs/r").mkdir(parents=True)
    return tmp_path / "a home"


def properties(home: Path, **more: Any) -> list[str]:
    data_dir = home / "trainyard"
    return sandbox.unit_properties(data_dir / "runs/r", data_dir, system=True, **more)


def written(found: list[str]) -> list[str]:
    return [each.removeprefix("BindPaths=").strip('"').lstrip("-") for each in found if each.startswith("BindPaths=")]


def test_only_the_run_folder_and_shared_caches_are_writable(home: Path) -> None:
    found, data_dir = properties(home), home / "trainyard"
    shared = [f"{data_dir}/store/cache", "/tmp/nvidia-mps", f"{data_dir}/checkpoints"]
    assert written(found) == [*shared, f"{data_dir}/runs/r"]
    assert {"ProtectSystem=strict", "ProtectHome=read-only", "PrivateTmp=yes", "NoNewPrivileges=yes"} <= {*found}
    assert f'TemporaryFileSystem="{data_dir}/runs:ro"' in found and f'InaccessiblePaths="-{home}/.ssh"' in found
    assert not any(entry.startswith(("ReadWritePaths", "PrivateDevices", "PrivateNetwork", "IPC")) for entry in found)
    assert not any(entry.startswith("IPAddress") for entry in found) and sandbox.address_properties([]) == []
    assert sandbox.address_properties(["10.0.0.1", "fe80::1%eth0"]) == [
        "IPAddressDeny=any",
        "IPAddressAllow=127.0.0.0/8 ::1/128 10.0.0.1 fe80::1",
    ]


def test_what_runs_execute_from_a_cache_is_in_the_run_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, ran = link_free(home / "trainyard/runs/r"), list[list[str]]()

    def record(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", record)
    request = StartRequest(str(run_dir), ["true"], unit="u", data_dir=home / "trainyard")
    start_unit(["systemd-run"], request, run_dir, ["true"])
    places = {"CUDA_CACHE_PATH": "/nv", "TORCHINDUCTOR_CACHE_DIR": "/inductor", "TRITON_CACHE_DIR": "/triton"}
    caches = {name: f"{run_dir}/cache{below}" for name, below in (places | {"XDG_CACHE_HOME": ""}).items()}
    assert {f"--setenv={name}={folder}" for name, folder in caches.items()} <= {*ran[-1]}
    for name, folder in caches.items():
        monkeypatch.setenv(name, folder)
    assert caches.items() <= clean_environment().items(), "the supervisor passes them to the ranks"


@pytest.mark.parametrize("linked", [False, True])
def test_a_variable_makes_no_folder_writable_that_programs_outside_need(
    home: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = home / "trainyard"
    if linked:  # the home of the login user and the Python environment are links
        for name, target in (("user", home), ("prefix", home / "python")):
            (home.parent / name).symlink_to(target)
        (home / "python").mkdir()
        user = pwd.struct_passwd((*pwd.getpwuid(0)[:5], str(home.parent / "user"), "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
        monkeypatch.setattr(sys, "prefix", str(home.parent / "prefix"))
    for name in ("models", "trainyard/own", ".ssh/x", "trainyard/venv/bin", "trainyard/queue", "trainyard/runs/other"):
        (home / name).mkdir(parents=True)
    (home / "link").symlink_to(home / ".ssh")
    refused = [home, data_dir, data_dir / "store", home / "trainyard/../.ssh/x", home / "link", Path("/"), Path("/etc")]
    refused += [data_dir / "venv/bin", data_dir / "queue", data_dir / "runs/other", Path(sys.prefix), home / "missing"]
    named = [home / "models", data_dir / "own"]
    before = written(properties(home))
    added = written(properties(home, writable=map(str, [*refused, *named])))
    assert sorted({*added} - {*before}) == sorted(map(str, named))


def test_a_unit_shows_what_the_spec_names_in_hidden_folders(home: Path) -> None:
    data_dir = home / "trainyard"
    (data_dir / "runs/other/merged").mkdir(parents=True)
    (data_dir / "store/models").mkdir(parents=True)
    (data_dir / "store/models/m").symlink_to(data_dir / "runs/other/merged")
    reads = [f"{data_dir}/store/models/m", "/etc/hostname", f"{data_dir}/runs/r/x", f"{data_dir}/runs/missing"]
    before = properties(home)
    other = data_dir / "runs/other"  # a rank can exchange what is in it, but not the folder itself
    shown = {f'BindReadOnlyPaths="{other}"', f'InaccessiblePaths="-{other}/env"'}
    assert {*properties(home, reads=reads)} - {*before} == shown


def test_links_of_ranks_decide_nothing(home: Path) -> None:
    """A rank leaves a link in a folder that it may write; the next start gets a unit without its target."""
    data_dir, hub = home / "trainyard", home / "disk/hub"
    for folder in (home / ".config", home / ".cache/pip", data_dir / "runs/other", data_dir / "checkpoints", hub):
        folder.mkdir(parents=True)
    (home / "hub").symlink_to(hub)  # of the user: no variable opens the home itself
    before = properties(home)
    places = [data_dir / "runs/r", data_dir / "runs/other", data_dir / "checkpoints", data_dir / "store/cache", hub]
    links = [place / "link" for place in places]
    for target in (home / ".config", home / ".cache/pip", data_dir / "runs", Path("/run")):
        for link in links:
            link.symlink_to(target)
        named = [*links, *(link / "." / "systemd/.." for link in links), home / "hub/link"]
        found = written(properties(home, writable=map(str, [hub, *named])))
        assert found == [*written(before)[:-1], str(hub), f"{data_dir}/runs/r"]
        assert written(properties(home, writable=map(str, named))) == written(before), "another run opened their folder"
        assert properties(home, reads=map(str, named)) == before
        for link in links:
            link.unlink()
    assert str(hub) in written(properties(home, writable=[str(home / "hub")]))


def test_what_is_neither_bound_nor_shown(home: Path) -> None:
    """Ranks of a run that overlaps could exchange a folder in one that is bound, until the service manager binds it."""
    for name in ("hub/ds", ".cache"):
        (home / name).mkdir(parents=True)
    before = properties(home)
    assert {*properties(home, writable=[f"{home}/hub/ds", f"{home}/hub"])} - {*before} == {f'BindPaths="-{home}/hub"'}
    assert properties(home, reads=["/run", "/tmp", f"{home}/.cache", f"{home}/trainyard/runs"]) == before
    places = ".docker/run", ".docker/desktop", ".lima", ".colima", ".vscode-server", ".cursor-server"
    assert {f'InaccessiblePaths="-{home}/{name}"' for name in places} <= {*before}


def test_folders_that_appear_later_are_hidden(home: Path) -> None:
    """The service manager ignores missing ones."""
    (home / "trainyard/queue").mkdir(mode=0o755)
    data_dir = home / "trainyard"
    sandbox.unit_properties(data_dir / "runs/r", data_dir, system=False)
    assert not (home / ".ssh").exists()
    properties(home)
    modes = {"trainyard/dashboard": 0o700, "trainyard/queue": 0o755, ".ssh": 0o700, ".cache": 0o700}
    assert {name: (home / name).stat().st_mode & 0o777 for name in modes} == modes


def test_the_empty_folder_of_a_start_is_no_dashboard(tmp_path: Path) -> None:
    """Else reset.yml would remove a service and a key that no role has installed."""
    tasks = Path(__file__).parents[2] / "roles/dashboard/tasks/remove.yml"
    check = yaml.safe_load(tasks.read_text(encoding="utf-8"))[0]
    folders = {"_dashboard_dir": tmp_path / "dashboard", "_dashboard_lib": tmp_path / "lib"}
    argv = [jinja2.Template(word).render(folders) for word in check["ansible.builtin.command"]["argv"]]
    installed = lambda: subprocess.run(argv).returncode == 0  # noqa: E731
    folders["_dashboard_dir"].mkdir()
    assert not installed()
    (folders["_dashboard_dir"] / "config.json").touch()
    assert installed()
    (folders["_dashboard_dir"] / "config.json").rename(folders["_dashboard_lib"])
    assert installed()


def test_a_shared_folder_that_leads_elsewhere_is_refused(home: Path) -> None:
    (home / "trainyard/store").mkdir()
    (home / "trainyard/store/cache").symlink_to(home / ".ssh")
    with pytest.raises(SupervisorError, match="store/cache is a link"):
        properties(home)


def test_root_with_folders_of_others_has_no_users_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capability to open them holds for users of the host only."""
    monkeypatch.setattr(sandbox, "has_user_namespaces", lambda: True)
    for capability, private in (("", True), ("CAP_DAC_OVERRIDE", False)):
        monkeypatch.setattr(sandbox, "needed_capabilities", lambda _, found=capability: found)
        assert ("PrivateUsers=yes" in properties(home)) is private
    monkeypatch.setattr(sandbox, "needed_capabilities", lambda _: "")
    monkeypatch.setattr(sandbox, "has_user_namespaces", lambda: False)
    assert "PrivateUsers=yes" not in properties(home)


def test_a_unit_of_a_user_has_only_what_needs_no_privileges(home: Path) -> None:
    data_dir = home / "trainyard"
    found = sandbox.unit_properties(data_dir / "runs/r", data_dir, system=False)
    assert found == list(sandbox.ANY_UNIT) and "NoNewPrivileges=yes" in found
    assert not (data_dir / "store").exists()


def test_the_request_names_the_paths_of_the_spec_and_of_variables() -> None:
    spec = {"model": "/d/store/m", "dataset": [{"path": "/d/store/x", "weight": 1}, "org/name"], "teacher": ""}
    reads = sorted(paths_in(spec))
    request = start_request(PlanEntry("a", run_dir="/d/runs/r", ranks=[0], reads=reads, writable=["/out"]), ["a"], [])
    assert request["reads"] == ["/d/store/m", "/d/store/x"] and request["writable"] == ["/out"]


# Units of programs that read what ranks wrote ------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [apart.merge, apart.evaluate, apart.gguf_export])
def test_programs_reach_no_machine_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Any) -> None:
    run_dir, trainer = tmp_path / "runs/r", tmp_path / "trainer.zip"
    run_dir.mkdir(parents=True)
    trainer.write_bytes(b"archive")
    request = {"trainer": str(trainer), "digest": sha256_file(trainer), "run_dir": str(run_dir), "reads": []}
    request |= {"backend": "auto", "limit": 9, "input": {}}
    ran = list[list[str]]()
    monkeypatch.setattr(apart.os, "execvpe", lambda _file, command, _environment: ran.append(command))
    monkeypatch.setattr(apart.os, "dup2", lambda *_: None)
    for systemd, limited in (["systemd-run"], True), (["systemd-run", "--user"], False):
        monkeypatch.setattr(apart, "choose_backend", lambda _, found=systemd: found)
        verb(request)
        words = ran.pop()
        caches = {word for word in words if word.startswith("--setenv=") and "CACHE" in word}
        assert ("--property=IPAddressDeny=any" in words) is limited, "a user's manager cannot limit addresses"
        assert bool(caches) is limited and not any(str(run_dir) in word for word in caches)
        assert "--property=MemoryMax=90%" in words
        if limited:
            assert {"--property=PrivateTmp=yes", "--setenv=XDG_CACHE_HOME=/tmp/cache"} <= {*words}
