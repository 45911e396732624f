"""Plan the Python environment of every host, and select the hosts that fetch the wheels."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import sha256_file, write_atomic
from trainer.common.formats import table
from trainyard.project_folder import shared_folder
from trainyard.python_env import resolve
from trainyard.python_env.bundle import pip_archive, trainer_version, trainer_wheel
from trainyard.python_env.conda_lock import about, rattler_wheel, solve_lock
from trainyard.python_env.resolve import EnvironmentBuildError, EnvironmentRequest
from trainyard.python_env.uv_resolve import resolved
from trainyard.remote.package_versions import FOREIGN
from trainyard.wire.connection import Host

UNCHANGED = {"key": "", "todo": "none", "flavour": "", "tag": "", "serves": False, "fetches": False}

Infos = Mapping[str, Mapping[str, Any]]


def plan_environments(
    top: Path, hosts: Sequence[Host], infos: Infos, options: Mapping[str, Any], build: bool
) -> dict[str, Any]:
    """Plan the environments of the play, and build on the controller what the hosts receive.

    Returns `hosts`, the plan of each, which for one that fetches has its `packages` and the `index` of torch; `errors`,
    of hosts that cannot have the environment, without a plan; `todo`, whether any changes; `trainer`, the version of the
    trainer's wheel; `kit`, the paths of `pip`, `trainer` and `rattler` on the controller; `conda`, the packages that
    rattler installs. Raises EnvironmentBuildError: there is no environment that all other hosts can have.

    Args:
        top: the project's folder.
        hosts: hosts that include all of `infos`.
        infos: for each host what `python_env_info` returned, in the inventory's order.
        options: fields of `trainyard.commands.role_steps.EnvironmentOptions`.
        build: whether to build pip's archive and the trainer's wheel if any host changes.
    """
    packages, shared = options["packages"], shared_folder()
    torch = options["torch"] or packages != "standard"
    errors = {host: error for host, info in infos.items() if (error := host_error(info, torch))}
    infos = {host: info for host, info in infos.items() if host not in errors}
    managed = {host: info for host, info in infos.items() if info["env"] != "as-is"}
    cuda = options["torch"] and resolve.choose_flavour(options["flavour"], managed) != "cpu"
    extras = [*options["extras"], *(["nvml"] if cuda else []), *([packages] if packages != "standard" else [])]
    lock = resolve.read_constraints(Path(options["lock"] or shared / resolve.FLAVOURS[packages]))
    request = EnvironmentRequest(
        resolve.requirements(shared / "pyproject.toml", extras, options["torch"]),
        lock,
        trainer_version(),
        options["flavour"],
        _conda_lock(top, managed, options, build),
        packages,
    )
    resolve.check_lock(request)
    plans = plan(infos, request)
    conda = [info for info in infos.values() if info["env"] == "conda"]
    todo = any(entry["todo"] != "none" for entry in plans.values())
    folder = top / ".trainyard" / "python"
    kit = {"pip": str(pip_archive(folder)), "trainer": str(trainer_wheel(folder))} if todo and build else {}
    if kit and any(info["env"] == "conda" and plans[host]["todo"] == "all" for host, info in infos.items()):
        wheel = rattler_wheel(folder, conda[0]["machine"])
        kit |= {"rattler": str(wheel), "rattler_digest": sha256_file(wheel)}
    # Every attempt has its own folder, into which processes of an interrupted attempt do not write.
    attempt = secrets.token_hex(3)
    by_name = {host.name: host for host in hosts}
    for name, entry in plans.items():
        entry["fresh"] = f"{entry['key']}-{attempt}"
        entry["source"] = source(name, by_name[entry["builder"]], options["port"])
        if build and entry["fetches"]:
            wanted = (entry["tag"], infos[name]["machine"], entry["flavour"])
            entry["packages"], entry["index"] = resolved(request, *wanted, options, folder / entry["fresh"])
    return {
        "changed": False,
        "todo": todo,
        "hosts": plans,
        "errors": errors,
        "trainer": request.trainer,
        "kit": kit,
        "conda": resolve.conda_packages(request.conda) if conda else [],
    }


def _conda_lock(top: Path, infos: Infos, options: Mapping[str, Any], build: bool) -> str:
    """Return the text of the lock of conda, solved and kept beside the inventory if there is none; empty if no host needs it.

    Raises EnvironmentBuildError: there is no solution, or hosts have unlike architectures.
    """
    machines = sorted({info["machine"] for info in infos.values() if info["env"] == "conda"})
    if not machines:
        return ""
    if len(machines) > 1:
        what = f"whose lock is for one architecture, but hosts have {' and '.join(machines)}"
        raise EnvironmentBuildError(f"python_env is conda, {what}: set python_env: venv")
    folder = Path(options["conda_folder"] or top)
    text = resolve.conda_lock(options["conda_lock"], folder)
    if not text:
        work = top / ".trainyard" / "python"
        text = solve_lock(options["conda_channel"], options["conda_python"], machines[0], work)
        if build:
            try:
                write_atomic(folder / resolve.CONDA_LOCK, text)
            except OSError as error:
                what = f"cannot write {folder / resolve.CONDA_LOCK}: {error.strerror}"
                raise EnvironmentBuildError(f"python_env is conda: {what}: set python_conda_lock") from None
    wanted = about(machines[0])[0]
    if other := [each for each in resolve.conda_packages(text) if each["subdir"] not in (wanted, "noarch")]:
        what = f"{other[0]['file']} is for {other[0]['subdir']}, but the hosts are {machines[0]}"
        raise EnvironmentBuildError(f"python_conda_lock: {what}: remove the lock to solve again")
    return text


def source(name: str, builder: Host, port: int) -> str:
    """Return the URL from which a host gets its wheels: its own folder, or the server of its builder."""
    if builder.name == name:
        return f"file://{builder.data_dir}/python/shared"
    return f"http://{f'[{builder.address}]' if ':' in builder.address else builder.address}:{port}"


def plan(infos: Infos, request: EnvironmentRequest) -> dict[str, dict[str, Any]]:
    """Return for every host its environment, the work to do, and the host that fetches the wheels.

    Returns For each host `key` of the environment, `todo` (none, trainer, all), `builder` (the first host with the same
    key, which fetches for all of them), `fetches` (whether this host must fetch), `serves` (whether others need its
    wheels), `tag` and `flavour`. Raises EnvironmentBuildError: a host cannot have the environment. `infos`: for each
    host what `python_env_info` returned, in the inventory's order. `request`: the contents of every environment.
    """
    managed = {host: info for host, info in infos.items() if info["env"] != "as-is"}
    flavour = resolve.choose_flavour(request.flavour, managed)
    if request.packages == "unsloth" and managed:
        resolve.check_unsloth(managed, flavour)
    plans: dict[str, dict[str, Any]] = {}
    builders: dict[str, str] = {}
    for host, info in managed.items():
        conda = info["env"] == "conda"
        version = resolve.conda_python(resolve.conda_packages(request.conda)) if conda else info["version"]
        tag = ".".join(version.split(".")[:2])
        parts = [request.requirements, request.constraints, flavour, info["env"], tag, info["machine"]]
        if conda:
            parts.append(request.conda)
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        marker = info["marker"]
        todo = "all" if marker.get("key") != key else "trainer" if marker.get("trainer") != request.trainer else "none"
        builder = builders.setdefault(key, host)
        plans[host] = {"key": key, "todo": todo, "builder": builder, "flavour": flavour, "tag": tag, "serves": False}
    for host, entry in plans.items():
        others = [other for name, other in plans.items() if name != host and other["todo"] == "all"]
        entry["serves"] = any(other["builder"] == host for other in others)
        # A builder keeps its wheels. If they are missing, it fetches them again for the hosts that need them.
        needed = entry["builder"] == host and (entry["todo"] == "all" or entry["serves"])
        entry["fetches"] = needed and entry["key"] not in managed[host]["wheels"]
    for host in infos:
        plans.setdefault(host, UNCHANGED | {"builder": host})
    return plans


def host_error(info: Mapping[str, Any], torch: bool) -> str:
    """Return why the environment, with `torch` or without, cannot be built on a host that `python_env_info` describes; or an empty string."""
    link, base = info["link"], info["base"]
    if info["env"] == "as-is":
        return ""
    if info["python"] != f"{link}/bin/python":
        what = f"cluster_python is {info['python']}, but python_env={info['env']} builds {link}/bin/python"
        return f"{what}: remove cluster_python, or set python_env: as-is"
    if info["blocked"]:
        return f"{link} exists and trainyard did not create it: move it, or set python_env: as-is"
    if info.get("noexec"):
        what = f"{Path(link).parent} is on a file system with the option noexec, which runs no program"
        return f"{what}: remove that option and remount it, or set cluster_data_dir"
    if torch and info["machine"] not in resolve.MACHINES:
        what = f"torch has no wheels for {info['machine']}, only for {' and '.join(resolve.MACHINES)}"
        return f"{what}: set python_env: as-is, and cluster_python"
    if info["env"] == "conda":
        return ""
    if not info["version"]:
        return f"there is no Python at {base}: apt install python3, or set python_base"
    if not resolve.is_supported_python(info["version"]):
        what = f"{base} is Python {info['version']}, 3.11 to 3.14 is required"
        return f"{what}: set python_base to an installed one, or set python_env: conda, which installs its own"
    return "" if info["has_venv"] else f"{base} has no module venv: apt install python3-venv"


def consistency_error(infos: Infos) -> str:
    """Return what differs between the environments of the hosts that have one, or an empty string if they are the same.

    It is one line, and a table after an empty line. `infos`: what `python_env_info` returned after the environment was
    built, by host.
    """
    versions = {host: dict(info["versions"]) for host, info in infos.items()}
    # An environment that trainyard does not manage needs no trainer wheel: a run brings its own trainer.
    if any(info["env"] == "as-is" for info in infos.values()):
        for found in versions.values():
            found.pop("trainyard-cluster", None)
    lines = differences({host: found for host, found in versions.items() if found})
    return "\n".join([DIFFERENT, "", *lines]) if lines else ""


DIFFERENT = "the Python environments of the hosts differ: make them equal (see roles/python/README.md)"


def differences(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a table with one row for each package whose version differs between hosts; empty if there is none.

    The version of Python may differ: ranks exchange tensors and plain values, which every supported version reads.
    """
    hosts = list(versions)
    names = sorted({name for entry in versions.values() for name in entry} - {"python", FOREIGN})
    rows = [[name, *(versions[host].get(name, "none") for host in hosts)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return table([["", *hosts], *rows]) if rows else []
