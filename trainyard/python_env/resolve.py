"""Which Python environment every host is to have, and which host makes it ready for the others. Pure Python, no Ansible."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST, NEWEST = (3, 11), (3, 13)  # pyproject.toml: requires-python
# Builds of torch, the best first: least driver, first and last compute capability. CUDA 13 runs on drivers from 580 and dropped
# what is older than Turing; every CUDA 12 runs from 525, 12.6 does not know Blackwell (NVIDIA's "CUDA compatibility", release
# notes of CUDA 13.0; PyTorch's RELEASE.md).
BUILDS = (("cu130", 580, 7.5, 99.0), ("cu128", 570, 7.5, 99.0), ("cu126", 525, 5.0, 9.0))
CONDA_LINE = re.compile(
    r"^(?P<url>(?:https?|file)://\S+/(?P<file>[^/#\s]+\.(?:conda|tar\.bz2)))#(?:sha256:)?(?P<digest>[0-9a-f]{64})$"
)


class EnvironmentBuildError(Exception):
    """An environment cannot be had like this; the message is one plain line."""


@dataclass(frozen=True)
class Wish:
    """What the play wants of every environment, the same on all hosts.

    `requirements` and `pins` are lines as pip takes them; `trainer` is the version of the trainer's wheel; `conda` the
    explicit lock of the conda environment (its text), empty for none.
    """

    requirements: tuple[str, ...]
    pins: tuple[str, ...]
    trainer: str
    flavour: str = "auto"
    conda: str = ""


def requirements(pyproject: Path, extras: list[str], torch: bool) -> tuple[str, ...]:
    """Return what a node needs: the project's dependencies, the extra `node` if it is to have torch, and `extras`.

    Raises:
        EnvironmentBuildError: there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    known = project["optional-dependencies"]
    for name in extras:
        if name not in known:
            raise EnvironmentBuildError(
                f"python_extras: there is no extra {name!r}; {pyproject.name} has {', '.join(sorted(known))}"
            )
    groups = ["node", *extras] if torch else extras
    return tuple(dict.fromkeys([*project["dependencies"], *(line for name in groups for line in known[name])]))


def pins(lock: Path) -> tuple[str, ...]:
    """Return the lines of a constraints file, without comments. Raises EnvironmentBuildError."""
    try:
        lines = [line.split("#")[0].strip() for line in lock.read_text().splitlines()]
    except OSError as error:
        raise EnvironmentBuildError(f"python_lock: cannot read {lock}: {error.strerror}") from None
    return tuple(line for line in lines if line)


def choose_flavour(wanted: str, looks: dict[str, dict[str, Any]]) -> str:
    """Return the build of torch for all hosts: `wanted`, or the best that all drivers and GPUs run; cpu without any driver.

    One for all, because ranks of different builds do not train together; a host without a GPU runs a CUDA build too.

    Raises:
        EnvironmentBuildError: there is no such build.
    """
    drivers = {host: look["driver"] for host, look in looks.items() if look["driver"]}
    if wanted != "auto" or not drivers:
        return "cpu" if wanted == "auto" else wanted
    cards = [float(capability) for look in looks.values() for capability in look["capabilities"]]
    for build, least, first, last in BUILDS:
        if all(major(driver) >= least for driver in drivers.values()) and all(first <= card <= last for card in cards):
            return build
    host, driver = min(drivers.items(), key=lambda entry: major(entry[1]))
    raise EnvironmentBuildError(
        f"no build of torch suits all GPUs (compute capability {', '.join(map(str, sorted(set(cards))))}) and drivers (the oldest "
        f"is {driver} on {host}): upgrade that driver, leave a host out, or set python_torch_flavour"
    )


def major(version: str) -> int:
    """Return the first number of a version: 580 of 580.65.06."""
    return int(re.match(r"\d*", version)[0] or 0)  # type: ignore[index]


def conda_packages(text: str) -> list[dict[str, str]]:
    """Return url, file name and digest of every package in an explicit conda lock (`conda list --explicit --sha256`).

    Raises:
        EnvironmentBuildError: a line is neither a package with its digest nor a comment.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#") or line == "@EXPLICIT":
            continue
        match = CONDA_LINE.match(line)
        if not match:
            raise EnvironmentBuildError(
                f"python_conda_lock: line {number}: takes URL#sha256 of a package, as conda list --explicit --sha256 writes it"
            )
        found.append(match.groupdict() | {"subdir": match["url"].rsplit("/", 2)[1]})
    return found


def conda_python(packages: list[dict[str, str]]) -> str:
    """Return the version of Python in a conda lock. Raises EnvironmentBuildError."""
    for package in packages:
        if match := re.match(r"python-(\d+\.\d+\.\d+)-", package["file"]):
            return match[1]
    raise EnvironmentBuildError("python_conda_lock: there is no package python in it")


def plan(looks: dict[str, dict[str, Any]], wish: Wish) -> dict[str, dict[str, Any]]:
    """Say for every host which environment it is to have, what is to do there, and who fetches for it.

    Args:
        looks: for each host what `python_env_info` found, in the inventory's order.

    Returns:
        For each host `key` of the environment, `todo` (none, trainer, all), `builder` (the first host with the same key,
        who fetches for all of them), `fetches` (it has to, now), `serves` (others wait for its wheels), `tag` and `flavour`.

    Raises:
        EnvironmentBuildError: a host cannot have one.
    """
    ours = {host: look for host, look in looks.items() if look["env"] != "as-is"}
    flavour = choose_flavour(wish.flavour, ours)
    answer: dict[str, dict[str, Any]] = {}
    builders: dict[str, str] = {}
    for host, look in ours.items():
        check(host, look, wish)
        version = conda_python(conda_packages(wish.conda)) if look["env"] == "conda" else look["version"]
        tag = ".".join(version.split(".")[:2])
        parts = [wish.requirements, wish.pins, flavour, look["env"], tag, look["machine"]]
        if look["env"] == "conda":
            parts.append(wish.conda)
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        marker = look["marker"]
        todo = "all" if marker.get("key") != key else "trainer" if marker.get("trainer") != wish.trainer else "none"
        builder = builders.setdefault(key, host)
        answer[host] = {"key": key, "todo": todo, "builder": builder, "flavour": flavour, "tag": tag, "serves": False}
    for host, entry in answer.items():
        entry["serves"] = any(
            other["builder"] == host and other["todo"] == "all" for name, other in answer.items() if name != host
        )
        # A builder keeps its wheels; where they are gone it fetches them again, if any host needs them.
        needed = entry["builder"] == host and (entry["todo"] == "all" or entry["serves"])
        entry["fetches"] = needed and entry["key"] not in ours[host]["wheels"]
    for host in looks:
        answer.setdefault(
            host,
            {"key": "", "todo": "none", "builder": host, "flavour": "", "tag": "", "serves": False, "fetches": False},
        )
    return answer


def check(host: str, look: dict[str, Any], wish: Wish) -> None:
    """Check that the host can have the environment that it is to have. Raises EnvironmentBuildError."""
    if look["python"] != look["link"] + "/bin/python":
        raise EnvironmentBuildError(
            f"{host}: cluster_python is {look['python']}, and the environment of python_env={look['env']} would be "
            f"{look['link']}/bin/python: leave cluster_python out, or say python_env: as-is"
        )
    if look["blocked"]:
        raise EnvironmentBuildError(
            f"{host}: {look['link']} is there and is not ours: move it away, or say python_env: as-is"
        )
    if look["env"] == "conda":
        if not wish.conda:
            raise EnvironmentBuildError(
                "python_env is conda: name a lock (python_conda_lock), see roles/python/README.md"
            )
        return
    version = tuple(int(part) for part in look["version"].split(".")[:2]) if look["version"] else ()
    if not version:
        raise EnvironmentBuildError(
            f"{host}: there is no Python at {look['base']}: apt install python3, or set python_base"
        )
    if not OLDEST <= version <= NEWEST:
        raise EnvironmentBuildError(
            f"{host}: {look['base']} is Python {look['version']}, takes 3.11 to 3.13: set python_base to one that is "
            "installed there, or say python_env: conda, which brings its own"
        )
    if not look["has_venv"]:
        raise EnvironmentBuildError(f"{host}: {look['base']} has no module venv: apt install python3-venv")


def differences(versions: dict[str, dict[str, str]]) -> list[str]:
    """Return a table of what differs between the hosts' environments, one line a package; empty if nothing does."""
    hosts = list(versions)
    names = sorted({name for entry in versions.values() for name in entry})
    rows = [[name, *(versions[host].get(name, "none") for host in hosts)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return []
    rows.insert(0, ["", *hosts])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
