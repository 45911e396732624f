"""The plan of the Python environments: what each host gets, and which host fetches the wheels."""

import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from tables import table

from trainyard.python_env import resolve, uv_resolve
from trainyard.python_env.bundle import pip_archive, trainer_version, trainer_wheel
from trainyard.python_env.conda_lock import rattler_wheel, solve_lock
from trainyard.python_env.environment_plan import consistency_error, differences, plan, plan_environments
from trainyard.python_env.resolve import EnvironmentBuildError, EnvironmentRequest, choose_flavour
from trainyard.remote.package_versions import package_versions
from trainyard.wire.connection import Host

TOP = Path(__file__).resolve().parents[2]
REQUEST = EnvironmentRequest(("pydantic>=2",), ("pydantic==2.1",), "0.1.0+aa")


def info(**more: Any) -> dict[str, Any]:
    return table("environments")["info"] | more


def test_the_first_host_of_a_kind_fetches_for_all_of_its_kind() -> None:
    hosts = plan({"a": info(), "b": info(version="3.12.3"), "c": info(), "d": info(env="as-is", python="/p")}, REQUEST)
    assert [hosts[name]["builder"] for name in "abcd"] == ["a", "b", "a", "d"]
    assert [hosts[name]["fetches"] for name in "abcd"] == [True, True, False, False]
    assert [hosts[name]["serves"] for name in "abcd"] == [True, False, False, False]
    assert [hosts[name]["todo"] for name in "abcd"] == ["all", "all", "all", "none"]


def test_existing_environments_stay_and_wheels_are_reused() -> None:
    key = plan({"a": info()}, REQUEST)["a"]["key"]
    complete = {"key": key, "trainer": REQUEST.trainer}
    hosts = plan(
        {"a": info(marker=complete, wheels=[key]), "b": info(), "c": info(marker=complete | {"trainer": "old"})},
        REQUEST,
    )
    assert [hosts[name]["todo"] for name in "abc"] == ["none", "all", "trainer"]
    assert hosts["a"]["serves"] and not hosts["a"]["fetches"]
    lost = plan({"a": info(marker=complete), "b": info()}, REQUEST)
    assert lost["a"]["fetches"] and lost["a"]["todo"] == "none"
    changed = plan(
        {"a": info(marker=complete)}, EnvironmentRequest(REQUEST.requirements, ("pydantic==2.2",), REQUEST.trainer)
    )
    assert changed["a"]["todo"] == "all"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (info(version="3.10.12"), "Python 3.10.12, 3.11 to 3.14 is required"),
        (info(version="3.15.0"), "python_env: conda"),
        (info(version=""), "there is no Python at /usr/bin/python3"),
        (info(has_venv=False), "apt install python3-venv"),
        (info(blocked=True), "/data/venv exists and trainyard did not create it"),
        (info(python="/opt/python"), "set python_env: as-is"),
        (info(noexec=True), "/data is on a file system with the option noexec"),
        (info(machine="riscv64"), "torch has no wheels for riscv64, only for x86_64 and aarch64: set"),
    ],
)
def test_the_error_of_a_host_is_one_line(host: dict[str, Any], message: str) -> None:
    made = unsloth_plan({"a": host, "b": info(), "c": info()}, packages="standard")
    assert message in made["errors"]["a"] and "\n" not in made["errors"]["a"]
    assert {name: made["hosts"][name]["builder"] for name in made["hosts"]} == {"b": "b", "c": "b"}, "the others go on"


def test_an_aarch64_host_has_an_environment_of_its_own_with_the_same_versions() -> None:
    made = unsloth_plan({"a": info(), "b": info(machine="aarch64"), "c": info(machine="aarch64")}, packages="standard")
    assert [made["hosts"][name]["builder"] for name in "abc"] == ["a", "b", "b"]
    assert [made["hosts"][name]["flavour"] for name in "abc"] == ["cpu"] * 3
    grace = unsloth_plan({"b": info(machine="aarch64", driver="580.95.05", capabilities=["12.1"])})
    assert grace["hosts"]["b"]["todo"] == "all" and grace["hosts"]["b"]["flavour"] == "cu130"


def test_an_architecture_needs_wheels_of_what_is_installed() -> None:
    infos = {"a": info(), "b": info(machine="aarch64")}
    assert not unsloth_plan({"a": info(machine="riscv64")}, packages="standard", torch=False, extras=[])["errors"]
    assert unsloth_plan(infos, packages="standard", extras=["gpu", "deepspeed", "wandb"])["todo"]


@pytest.mark.parametrize(("wanted", "hosts", "build"), table("environments")["one_build_of_torch_for_all_hosts"])
def test_one_build_of_torch_for_all_hosts(wanted: str, hosts: list[tuple[str, list[str]]], build: str) -> None:
    infos = {f"h{place}": {"driver": driver, "capabilities": cards} for place, (driver, cards) in enumerate(hosts)}
    assert choose_flavour(wanted, infos) == build


def test_no_build_supports_both_an_old_and_a_new_gpu() -> None:
    infos = {"a": {"driver": "580.1", "capabilities": ["6.1"]}, "b": {"driver": "580.1", "capabilities": ["12.0"]}}
    with pytest.raises(EnvironmentBuildError, match=r"compute capability 6\.1, 12\.0"):
        choose_flavour("auto", infos)
    with pytest.raises(EnvironmentBuildError, match=r"the oldest is 470\.1 on a"):
        choose_flavour("auto", {"a": {"driver": "470.1", "capabilities": ["3.5"]}})


def test_requirements_of_a_node() -> None:
    pyproject = TOP / "pyproject.toml"
    small = resolve.requirements(pyproject, [], torch=False)
    assert [resolve.normal_name(line) for line in small] == list(resolve.NODE_BASE)
    assert any(line.startswith("torch>=") for line in resolve.requirements(pyproject, [], torch=True))
    assert "wandb" in resolve.requirements(pyproject, ["wandb"], torch=True)
    with pytest.raises(EnvironmentBuildError, match="there is no extra 'wandbb'"):
        resolve.requirements(pyproject, ["wandbb"], torch=True)
    assert all("==" in line for line in resolve.read_constraints(TOP / "constraints.txt"))


class FakeUv:
    """Stands in for uv: answers with a list of packages; the index of torch may not answer."""

    def __init__(self, answer: str, torch_index: bool = True) -> None:
        self.answer, self.torch_index, self.calls = answer, torch_index, list[list[str]]()

    def __call__(self, command: list[str], only: Any = ()) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        index = next((word for word in command if word.startswith("--index=")), "")
        if index and not self.torch_index:
            return subprocess.CompletedProcess(command, 2, "", f"error: Failed to fetch: {index[8:]}/torch/\n")
        return subprocess.CompletedProcess(command, 0, self.answer, "")


ANSWER = table("environments")["answer"]
NODE = EnvironmentRequest(
    ("pydantic>=2", "torch>=2"),
    ("pydantic==2.1 --hash=sha256:aa", "torch==2.13.0 --hash=sha256:cc --hash=sha256:ee"),
    "0+aa",
)


def test_the_digests_are_those_of_the_lock_where_it_has_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = FakeUv(ANSWER.format(build="+cpu"))
    monkeypatch.setattr(uv_resolve, "_run", uv)
    lines, index = uv_resolve.resolved(NODE, "3.12", "x86_64", "cpu", OPTIONS, tmp_path)
    assert index == "https://download.pytorch.org/whl/cpu" and f"--index={index}" in uv.calls[0]
    assert {"--python-version=3.12", "--python-platform=x86_64-manylinux_2_28", "--generate-hashes"} <= set(uv.calls[0])
    assert lines == table("environments")["the_digests_are_those"]
    uv.answer = ANSWER.replace("cc", "ff").format(build="+cu126")
    lines, _ = uv_resolve.resolved(NODE, "3.12", "x86_64", "cu126", OPTIONS, tmp_path)
    assert lines[1] == "torch==2.13.0+cu126 --hash=sha256:ff", "a build that the lock does not have"


def test_the_package_index_has_torch_where_its_own_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = FakeUv(ANSWER.format(build=""), torch_index=False)
    monkeypatch.setattr(uv_resolve, "_run", uv)
    lines, index = uv_resolve.resolved(NODE, "3.12", "x86_64", "cpu", OPTIONS, tmp_path)
    assert index == "" and lines[1].startswith("torch==2.13.0 ") and len(uv.calls) == 2
    with pytest.raises(EnvironmentBuildError, match="cu126 does not answer, and python_torch_flavour requires it"):
        uv_resolve.resolved(NODE, "3.12", "x86_64", "cu126", OPTIONS | {"flavour": "cu126"}, tmp_path)
    uv.calls.clear()
    uv_resolve.resolved(NODE, "3.12", "x86_64", "cpu", OPTIONS | {"wheelhouse": "/wheels"}, tmp_path)
    assert {"--no-index", "--find-links=/wheels"} <= set(uv.calls[0]) and len(uv.calls) == 1


@pytest.mark.slow
def test_uv_resolves_within_the_lock(tmp_path: Path) -> None:
    """The real uv, with the wheels of a folder."""
    name = "left_pad-1.0-py3-none-any.whl"
    files = {
        "left_pad.py": "",
        "left_pad-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: left-pad\nVersion: 1.0\n",
    }
    files["left_pad-1.0.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files["left_pad-1.0.dist-info/RECORD"] = ""
    for version in ("1.0", "2.0"):
        with zipfile.ZipFile(tmp_path / name.replace("1.0", version), "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path.replace("1.0", version), text.replace("1.0", version))
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    options = OPTIONS | {"wheelhouse": str(tmp_path)}
    request = EnvironmentRequest(("left-pad",), ("left-pad==1.0",), "0+aa")
    lines, _ = uv_resolve.resolved(request, "3.11", "x86_64", "cpu", options, tmp_path / "work")
    assert lines == [f"left-pad==1.0 --hash=sha256:{digest}"]
    with pytest.raises(EnvironmentBuildError, match=f"uv cannot get .* for Python 3.11 from {tmp_path}: ") as failed:
        request = EnvironmentRequest(("left-pad",), ("left-pad==3.0",), "0+aa")
        uv_resolve.resolved(request, "3.11", "x86_64", "cpu", options, tmp_path / "work")
    assert "\n" not in str(failed.value)


def test_differences_are_a_table_of_different_packages() -> None:
    same = {"python": "3.11.2", "torch": "2.13.0"}
    assert differences({"a": same, "b": dict(same)}) == []
    assert differences({"a": same, "b": {**same, "python": "3.13.5"}}) == [], "distributions have different Pythons"
    lines = differences({"a": same, "b": {**same, "torch": "2.12.1", "nccl": "2.27"}})
    assert [line.split() for line in lines] == [["a", "b"], ["nccl", "none", "2.27"], ["torch", "2.13.0", "2.12.1"]]


def test_a_conda_lock_is_read_line_by_line() -> None:
    digest = "0" * 64
    text = f"# platform\n@EXPLICIT\nhttps://c/linux-64/python-3.12.8-h_0.conda#{digest}\nfile:///m/noarch/tzdata-1-0.tar.bz2#sha256:{digest}\n"
    packages = resolve.conda_packages(text)
    assert [(one["subdir"], one["file"]) for one in packages] == [
        ("linux-64", "python-3.12.8-h_0.conda"),
        ("noarch", "tzdata-1-0.tar.bz2"),
    ]
    assert resolve.conda_python(packages) == "3.12.8"
    request = EnvironmentRequest(REQUEST.requirements, REQUEST.constraints, REQUEST.trainer, conda=text)
    # The system's Python does not matter with conda: different distributions are of one kind.
    hosts = plan({"a": info(env="conda", version="3.10.1"), "b": info(env="conda", version="3.13.0")}, request)
    assert hosts["a"]["key"] == hosts["b"]["key"] and hosts["b"]["builder"] == "a" and hosts["a"]["tag"] == "3.12"
    with pytest.raises(EnvironmentBuildError, match="line 1"):
        resolve.conda_packages("https://c/linux-64/python-3.12.8-h_0.conda\n")
    with pytest.raises(EnvironmentBuildError, match="no package python"):
        resolve.conda_python(packages[1:])


def test_a_lock_beside_the_inventory_is_used(tmp_path: Path) -> None:
    assert resolve.conda_lock("", tmp_path) == ""
    (tmp_path / "conda.lock").write_text("text")
    assert resolve.conda_lock("", tmp_path) == "text"
    other = {"a": info(env="conda"), "b": info(env="conda", machine="aarch64")}
    with pytest.raises(EnvironmentBuildError, match="for one architecture, but hosts have aarch64 and x86_64"):
        unsloth_plan(other, packages="standard")


def conda_channel(folder: Path, without_digest: str = "") -> str:
    """Write a channel with two releases of Python and their dependencies to a folder; return its URL."""
    packages: dict[str, Any] = table("environments")["packages"]
    for subdir, records in packages.items():
        found = {
            f"{name}-{version}-h_0.conda": {"name": name, "version": version, "build": "h_0", "build_number": 0}
            | {"depends": depends, "subdir": subdir, "size": 1}
            | ({} if name == without_digest else {"sha256": hashlib.sha256(f"{name}{version}".encode()).hexdigest()})
            for name, version, depends in records
        }
        (folder / subdir).mkdir(parents=True)
        document = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": found}
        (folder / subdir / "repodata.json").write_text(json.dumps(document))
    return folder.as_uri()


@pytest.mark.slow
def test_a_missing_lock_is_solved_and_kept(tmp_path: Path) -> None:
    """The real solver, from a channel in a folder."""
    url, folder = conda_channel(tmp_path / "channel"), tmp_path / "inventory"
    folder.mkdir()
    options = {"packages": "standard", "conda_folder": str(folder), "conda_channel": url, "torch": False}
    made = unsloth_plan({"a": info(env="conda")}, **options)
    assert [one["file"] for one in made["conda"]] == table("environments")["a_missing_lock"], (
        "3.12.9 has a dependency that the channel lacks"
    )
    first = made["conda"][0]
    assert first["url"] == f"{url}/linux-64/libffi-3.4.6-h_0.conda" and made["conda"][2]["subdir"] == "noarch"
    assert first["digest"] == hashlib.sha256(b"libffi3.4.6").hexdigest() and not list(folder.iterdir()), "a check"
    text = solve_lock(url, "3.12", "x86_64", tmp_path / "work")
    assert resolve.conda_packages(text) == made["conda"]
    for channel, python, message in (
        (conda_channel(tmp_path / "bad", "libffi"), "3.12", "the channel has no SHA-256 of libffi-3.4.6-h_0.conda"),
        (url, "3.11", "cannot solve python 3.11"),
    ):
        with pytest.raises(EnvironmentBuildError, match=message) as failed:
            solve_lock(channel, python, "x86_64", tmp_path / "work")
        assert "\n" not in str(failed.value)


@pytest.mark.slow
def test_packages_are_installed_by_their_digest(tmp_path: Path) -> None:
    """The program of the hosts, as the Python of this machine runs it."""
    files = {"bin/hello": b"#!/bin/sh\necho hello\n"}
    paths = [{"_path": "bin/hello", "path_type": "hardlink", "sha256": hashlib.sha256(files["bin/hello"]).hexdigest()}]
    about = {"name": "hello", "version": "1.0", "build": "0", "build_number": 0, "depends": [], "subdir": "linux-64"}
    files |= {
        "info/index.json": json.dumps(about).encode(),
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
    }
    package = tmp_path / "channel/linux-64/hello-1.0-0.tar.bz2"
    package.parent.mkdir(parents=True)
    with tarfile.open(package, "w:bz2") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
    wheel = rattler_wheel(tmp_path / "work", platform.machine())

    def install(digest: str, name: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "lock").write_text(f"{package.as_uri()}#{digest}\n")
        words = [
            TOP / "roles/python/files/install_conda.py",
            wheel,
            tmp_path / "lock",
            tmp_path / name,
            tmp_path / f"{name}-cache",
        ]
        return subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True, check=False)

    done = install(hashlib.sha256(package.read_bytes()).hexdigest(), "good")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "good/bin/hello").read_bytes() == files["bin/hello"]
    refused = install("0" * 64, "bad")
    assert refused.returncode == 1 and not (tmp_path / "bad/bin/hello").exists()
    assert "hello-1.0-0.tar.bz2 does not have the digest of the lock" in refused.stderr


@pytest.mark.slow
def test_the_kit_installs_into_a_bare_environment(tmp_path: Path) -> None:
    """Install pip's archive and the trainer's wheel as on a host, without ensurepip and network."""
    wheel, archive = trainer_wheel(tmp_path / "kit"), pip_archive(tmp_path / "kit")
    again = trainer_wheel(tmp_path / "again")
    assert wheel.read_bytes() == again.read_bytes() and wheel.name == again.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "trainer/config/run_spec.py" in names and "trainer/strategy/__init__.py" in names
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    site = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
    subprocess.run([python, "-I", "-m", "zipfile", "-e", archive, site], check=True)
    subprocess.run([python, "-I", "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel], check=True)
    installed = subprocess.run(
        [python, "-I", "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    assert f"trainyard-cluster=={trainer_version()}" in installed.stdout


def test_the_same_environment_on_all_hosts_is_consistent() -> None:
    same = {"python": "3.11.2", "trainyard-cluster": "0.1.0"}
    assert consistency_error({"a": info(versions=same), "b": info(versions=same)}) == ""
    assert consistency_error({"a": info(versions=same), "b": info()}) == "", "check mode builds no environment"
    other = {"a": info(versions=same), "b": info(versions={**same, "trainyard-cluster": "0.2.0"})}
    first, blank, *rows = consistency_error(other).split("\n")
    assert first.startswith("the Python environments of the hosts differ: ") and blank == ""
    assert [row.split() for row in rows] == [["a", "b"], ["trainyard-cluster", "0.1.0", "0.2.0"]]
    # An environment that trainyard does not manage has no separate trainer.
    assert consistency_error({**other, "c": info(env="as-is", versions={"python": "3.11.2"})}) == ""


# python_flavour: unsloth -------------------------------------------------------------------------------------------------

GPU = {"driver": "580.65.06", "capabilities": ["8.9"]}
OPTIONS = table("environments")["options"]


def unsloth_plan(infos: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    hosts = [Host(name, f"10.0.0.{place}", "/data", "/data/venv/bin/python") for place, name in enumerate(infos, 1)]
    return plan_environments(TOP, hosts, infos, OPTIONS | more, build=False)


def test_the_lock_of_unsloth_is_the_whole_environment_of_a_node() -> None:
    lock = resolve.read_constraints(TOP / "constraints-unsloth.txt")
    assert all(
        re.fullmatch(r"[a-z0-9-]+==[^ ;]+(; platform_machine == 'x86_64')?( --hash=sha256:[0-9a-f]{64})+", line)
        for line in lock
    )
    lines = resolve.requirements(TOP / "pyproject.toml", ["unsloth", "nvml"], torch=True)
    wanted = [Requirement(line) for line in lines]
    pinned = {name: re.split("[ ;]", version)[0] for name, _, version in (line.partition("==") for line in lock)}
    for requirement in wanted:
        assert pinned[resolve.normal_name(requirement.name)] in requirement.specifier, requirement
    assert pinned["triton"] and any(name.startswith("nvidia-nccl-cu13") for name in pinned), "as check_unsloth says"


def test_site_plans_the_environment_of_unsloth() -> None:
    made = unsloth_plan({"a": info(**GPU), "b": info()})
    assert [made["hosts"][name]["todo"] for name in "ab"] == ["all", "all"] and made["hosts"]["b"]["builder"] == "a"
    assert made["hosts"]["b"]["flavour"] == "cu130", "a host without a GPU has the same build"
    standard = unsloth_plan({"a": info(**GPU)}, packages="standard")
    assert standard["hosts"]["a"]["key"] != made["hosts"]["a"]["key"]
    done = {"key": made["hosts"]["a"]["key"], "trainer": made["trainer"]}
    assert not unsloth_plan({"a": info(**GPU, marker=done)})["todo"]


@pytest.mark.parametrize(
    ("infos", "more", "message"),
    [
        ({"a": info()}, {}, r"capability of 7.5 or higher \(no host has a driver\): install the driver"),
        ({"a": info(driver="550.1", capabilities=["8.9"])}, {}, r"driver 580 or newer .* \(a: driver 550.1\)"),
        ({"a": info(driver="580.1", capabilities=["6.1"])}, {}, "set python_flavour: standard"),
        ({"a": info(**GPU)}, {"extras": ["deepspeed"]}, "python_lock does not have deepspeed"),
        ({"a": info(**GPU)}, {"lock": "pins.txt"}, "its python_lock needs a digest for every package"),
    ],
)
def test_hosts_that_cannot_have_unsloth(
    infos: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pins.txt").write_text("torch==2.13.0\n")
    with pytest.raises(EnvironmentBuildError, match=message) as caught:
        unsloth_plan(infos, **more)
    assert "\n" not in str(caught.value)


# Versions that an interpreter reports --------------------------------------------------------------------------------


@pytest.mark.parametrize(("cuda", "found"), [("13.0", "2.28.9"), ("12.8", "2.27.3"), ("", None)])
def test_the_library_of_nccl_is_that_of_torch(tmp_path: Path, cuda: str, found: str | None) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    for name, version in (("torch", "2.13.0"), ("nvidia_nccl_cu13", "2.28.9"), ("nvidia_nccl_cu12", "2.27.3")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").touch()
    (site / "torch/version.py").write_text(f"cuda = {cuda or None!r}\n")
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    versions = package_versions(str(python), ("missing",))
    assert (versions["torch"], versions.get("cuda"), versions.get("nccl")) == ("2.13.0", cuda or None, found)
    assert "missing" not in versions
