"""The properties of the systemd unit of a run."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def bound(found: list[str], kind: str = "BindPaths") -> dict[str, str]:
    """Return {name: place} of the properties of a kind."""
    words = [each.partition("=")[2].split('":"') for each in found if each.startswith(f"{kind}=")]
    return {words[-1].strip('"').lstrip("-"): words[0].strip('"').lstrip("-") for words in words}


def shown(found: list[str]) -> dict[str, str]:
    return bound(found, "BindReadOnlyPaths")


def test_a_unit_starts_from_nothing_and_writes_the_run_folder(home: Path) -> None:
    (home / "trainyard/leases").mkdir()
    found, run_dir = properties(home), str(home / "trainyard/runs/r")
    assert bound(found) == {run_dir: run_dir}
    assert {"ProtectSystem=strict", "PrivateTmp=yes", "NoNewPrivileges=yes"} <= {*found}
    for name in ("home", "root", "var", "srv", "opt", "mnt", "media", "run"):
        assert f'TemporaryFileSystem="/{name}:ro,mode=0755"' in found or not Path("/", name).is_dir()
    assert not any(f'"/{name}:' in entry for entry in found for name in ("usr", "etc", "dev", "tmp", "proc", "lib64"))
    assert shown(found)[f"{home}/trainyard/leases"]
    assert {"/run/systemd/userdb", "/var/run/systemd/userdb"} <= {*shown(found)} or not Path(
        "/run/systemd/userdb"
    ).exists()
    # With ProtectHome, systemd would ignore the empty file systems at the same paths.
    left = "ProtectHome", "InaccessiblePaths", "ReadWritePaths", "PrivateDevices", "PrivateNetwork"
    assert not any(entry.startswith(left) for entry in found)
    assert not any(entry.startswith("IPAddress") for entry in found) and sandbox.address_properties([]) == []
    assert sandbox.address_properties(["10.0.0.1", "fe80::1%eth0"]) == [
        "IPAddressDeny=any",
        "IPAddressAllow=127.0.0.0/8 ::1/128 10.0.0.1 fe80::1",
    ]


def test_a_unit_shows_the_interpreter_by_all_its_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As uv makes environments: `python` is a link to a link in the home, and so is the folder of the interpreter."""
    for name in ("uv/cpython-3.12.4/bin", "work/.venv/bin", "src"):
        (home / name).mkdir(parents=True)
    (home / "uv/cpython-3.12.4/bin/python3.12").touch()
    (home / "uv/cpython-3.12").symlink_to("cpython-3.12.4")
    (home / "project").symlink_to("work")
    (home / "python").symlink_to(home / "uv/cpython-3.12/bin/python3.12")
    (home / "work/.venv/bin/python").symlink_to(home / "python")
    user = home / ".local/lib/python/site-packages"
    user.mkdir(parents=True)
    (user / "own.pth").write_text(f"import os\n{home}/src\n{home}\n")
    values = {"prefix": home / "project/.venv", "base_prefix": home / "uv/cpython-3.12"}
    values |= {"executable": home / "project/.venv/bin/python"}
    for name, value in values.items():
        monkeypatch.setattr(sys, name, str(value))
    monkeypatch.setattr(sys, "path", ["", "/proc/self/fd/3", f"{home}/missing", f"{home}/project/.venv/lib"])
    monkeypatch.setattr(sandbox.site, "getusersitepackages", lambda: str(user))
    found = {name: place for name, place in shown(properties(home)).items() if name.startswith(str(home))}
    folder, base, real = f"{home}/work/.venv", f"{home}/uv/cpython-3.12.4", f"{home}/uv/cpython-3.12.4/bin/python3.12"
    expected = {f"{home}/project/.venv": folder, folder: folder, f"{home}/uv/cpython-3.12": base, base: base}
    assert found == expected | {f"{home}/python": real, str(user): str(user), f"{home}/src": f"{home}/src"}


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
    (home / ".cache/hub").mkdir(parents=True)
    (home / "link").symlink_to(home / ".ssh")
    (home / "models/link").symlink_to(home / "trainyard/own")
    refused = [
        home,
        data_dir,
        data_dir / "store",
        home / "trainyard/../.ssh/x",
        home / "link",
        Path("/"),
        home / ".cache",
    ]
    refused += [data_dir / "venv/bin", data_dir / "queue", data_dir / "runs/other", Path(sys.prefix), Path("/var/lib")]
    (data_dir / "store").mkdir()
    for folder in [*refused, home / "models/link"]:
        with pytest.raises(SupervisorError, match=r"run_env: a run may not write .*: name a folder of its own"):
            properties(home, writable=[str(folder)])
    named = [home / "models", data_dir / "own", home / ".cache/hub"]
    ignored = [Path("/etc"), Path("/tmp"), home / "missing", Path("/usr/lib")]
    added = bound(properties(home, writable=map(str, [*ignored, *named])))
    assert {*added} - {*bound(properties(home))} == {*map(str, named)}


def test_a_unit_shows_what_the_spec_names_and_of_another_run_its_results(home: Path) -> None:
    data_dir = home / "trainyard"
    for name in (
        "trainyard/runs/other/merged",
        "trainyard/runs/other/state",
        "trainyard/store/models",
        "corpus",
        ".ssh",
    ):
        (home / name).mkdir(parents=True)
    (data_dir / "runs/other/env").touch()
    (data_dir / "runs/other/adapter").symlink_to(home / ".ssh")
    (data_dir / "store/models/m").symlink_to(data_dir / "runs/other/merged")
    (data_dir / "store/models/n").symlink_to(home / ".ssh")
    (home / "data").symlink_to(home / "corpus")
    before, merged = shown(properties(home)), f"{data_dir}/runs/other/merged"
    added = lambda *names: {  # noqa: E731
        name: place for name, place in shown(properties(home, reads=map(str, names))).items() if name not in before
    }
    assert added(data_dir / "store/models/m") == {f"{data_dir}/store/models/m": merged, merged: merged}
    assert added(data_dir / "runs/other") == {merged: merged}, "nor its variables, and no link of its ranks"
    assert added(home / "data") == dict.fromkeys([f"{home}/data", f"{home}/corpus"], f"{home}/corpus")
    store = str(data_dir / "store")
    assert added(store) == {store: store, merged: merged}
    nothing = [
        home,
        data_dir,
        "/",
        "/etc/hostname",
        data_dir / "runs/r/x",
        data_dir / "runs",
        data_dir / "runs/missing",
    ]
    nothing += [data_dir / "runs/other" / name for name in ("env", "adapter", "state")]
    assert added(*nothing, data_dir / "store/models/n") == {}


@pytest.mark.parametrize("linked", [False, True])
def test_a_snapshot_of_the_hub_is_shown_with_its_blobs(home: Path, linked: bool) -> None:
    hub = home / ".cache/huggingface/hub/models--m"
    for name in ("snapshots/1", "blobs"):
        (hub / name).mkdir(parents=True)
    (hub / "blobs/abc").touch()
    (hub / "snapshots/1/config.json").symlink_to("../../blobs/abc")
    (home / "hub").symlink_to(hub.parent)
    top = home / "hub/models--m" if linked else hub
    found = shown(properties(home, reads=[f"{top}/snapshots/1"]))
    assert {(f"{each}/{name}", f"{hub}/{name}") for each in (top, hub) for name in ("snapshots/1", "blobs")} == {
        (name, place) for name, place in found.items() if "models--m" in name
    }
    assert f"{home}/.cache/huggingface" not in found


def test_a_folder_of_the_root_is_empty_or_bound_but_not_both(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "hub").mkdir()
    made, real = [*os.scandir(home)], os.scandir
    monkeypatch.setattr(sandbox.os, "scandir", lambda top: made if top == "/" else real(top))
    empty = lambda **more: [each for each in properties(home, **more) if "mode=0755" in each]  # noqa: E731
    both = [f'TemporaryFileSystem="{home}/{name}:ro,mode=0755"' for name in ("hub", "trainyard")]
    assert empty() == both and empty(writable=[f"{home}/hub"]) == empty(reads=[f"{home}/hub"]) == both[1:]


def test_links_of_ranks_decide_nothing(home: Path) -> None:
    """A rank leaves a link in a folder that it may write; the next start gets a unit without its target."""
    data_dir, hub = home / "trainyard", home / "disk/hub"
    for folder in (home / ".config/x", home / ".cache/pip", data_dir / "runs/other", data_dir / "checkpoints/r", hub):
        folder.mkdir(parents=True)
    before = shown(properties(home, writable=[str(hub)]))
    places = [data_dir / "runs/r", data_dir / "runs/other", data_dir / "checkpoints/r", hub]
    for target in (home / ".config", data_dir / "runs", Path("/run"), home / "disk"):
        for place in places:
            (place / "link").symlink_to(target)
        named = [str(place / "link" / more) for place in places for more in (".", "x", "systemd/..")]
        assert shown(properties(home, writable=[str(hub)], reads=[*named, str(hub)])) == before
        for link in (hub / "link", data_dir / "checkpoints/r/link"):
            with pytest.raises(SupervisorError, match="a run may not write"):
                properties(home, writable=[str(hub), str(link)])
        for place in places:
            (place / "link").unlink()
    (data_dir / "checkpoints/r").rmdir()
    (data_dir / "checkpoints/r").symlink_to(home / ".config")
    assert f"{data_dir}/checkpoints/r" not in bound(properties(home))


def test_a_server_that_does_not_answer_is_one_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text("#!/bin/sh\nexec sleep 5\n")
    (tmp_path / "stat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sandbox, "MOUNT_LIMIT", 0.01)
    with pytest.raises(SupervisorError, match=r"^/nas/corpus: no answer within 0 s"):
        properties(home, reads=["/nas/corpus"])


def test_root_with_folders_of_others_has_no_users_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capability to open them holds for users of the host only."""
    monkeypatch.setattr(sandbox, "has_user_namespaces", lambda: True)
    for capability, private in (("", True), ("CAP_DAC_OVERRIDE", False)):
        monkeypatch.setattr(sandbox, "needed_capabilities", lambda _, found=capability: found)
        assert ("PrivateUsers=yes" in properties(home)) is private
    monkeypatch.setattr(sandbox, "needed_capabilities", lambda _: "")
    monkeypatch.setattr(sandbox, "has_user_namespaces", lambda: False)
    assert "PrivateUsers=yes" not in properties(home)
    assert {*sandbox.LIMITS} <= {*properties(home)}
    monkeypatch.setattr(sandbox, "SLICE", home)
    assert "Slice=trainyard-runs.slice" in (found := properties(home)) and not {*sandbox.LIMITS} & {*found}


def test_a_unit_of_a_user_has_only_what_needs_no_privileges(home: Path) -> None:
    data_dir = home / "trainyard"
    found = sandbox.unit_properties(data_dir / "runs/r", data_dir, system=False)
    assert found == [*sandbox.ANY_UNIT, *sandbox.LIMITS] and "NoNewPrivileges=yes" in found
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
