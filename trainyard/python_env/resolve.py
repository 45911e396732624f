"""The contents of a Python environment: requirements, pinned versions, the build of torch, conda packages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.inputs import read_regular, user_path

_MAX_LOCK = 64 * 1024 * 1024  # bytes of a file of pinned versions
# Builds of torch, the preferred one first: oldest driver, first and last compute capability. CUDA 13 needs driver 580 and
# does not support GPUs before Turing. CUDA 12 needs driver 525; 12.6 does not support Blackwell. Sources: NVIDIA's "CUDA
# compatibility" and release notes of CUDA 13.0; PyTorch's RELEASE.md.
BUILDS = (("cu130", 580, 7.5, 99.0), ("cu128", 570, 7.5, 99.0), ("cu126", 525, 5.0, 9.0))
CONDA_LINE = re.compile(
    r"^(?P<url>(?:https?|file)://\S+/(?P<file>[^/#\s]+\.(?:conda|tar\.bz2)))#(?:sha256:)?(?P<digest>[0-9a-f]{64})$"
)
CONDA_LOCK = "conda.lock"  # beside the inventory

FLAVOURS = {"standard": "constraints.txt", "unsloth": "constraints-unsloth.txt"}  # sets of packages, and their locks
# Dependencies of the project that every node gets: what the run spec needs, and uv, which installs the others.
NODE_BASE = ("pydantic", "pyyaml", "uv")
NOT_LOCKED = ("trackio",)  # it needs other versions of what a node has
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

OLDEST, NEWEST = (3, 11), (3, 14)  # those for which all pinned packages have wheels
MACHINES = ("x86_64", "aarch64")  # architectures for which all pinned packages have wheels


class EnvironmentBuildError(Exception):
    """An environment cannot be built as requested; the message is one line."""


@dataclass(frozen=True)
class EnvironmentRequest:
    """The contents of every environment of the play, the same on all hosts."""

    requirements: tuple[str, ...]  # lines in pip's format
    constraints: tuple[str, ...]  # lines of a constraints file, or of a lock with all packages and their digests
    trainer: str  # version of the trainer's wheel
    flavour: str = "auto"  # build of torch, or "auto"
    conda: str = ""  # text of an explicit conda lock; empty without one
    packages: str = "standard"  # set of packages, of `FLAVOURS`


def is_supported_python(version: str) -> bool:
    """Return whether an environment of a node can have this version of Python, such as "3.11.2"."""
    return OLDEST <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) <= NEWEST


def requirements(pyproject: Path, extras: Sequence[str], torch: bool) -> tuple[str, ...]:
    """Return the requirements of a node: `NODE_BASE`, the extra `node` if `torch`, and `extras`.

    Raises EnvironmentBuildError: there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    for name in extras:
        if name not in known:
            has = f"{pyproject.name} has {', '.join(sorted(known))}"
            raise EnvironmentBuildError(f"python_extras: there is no extra {name!r}; {has}")
    groups = ["node", *extras] if torch else extras
    base = [line for line in project["dependencies"] if normal_name(line) in NODE_BASE]
    return tuple(dict.fromkeys([*base, *(line for name in groups for line in known[name])]))


def read_constraints(lock: Path) -> tuple[str, ...]:
    """Return the lines of a constraints file, without comments. Raises EnvironmentBuildError."""
    lines = [line.split("#")[0].strip() for line in _read("python_lock", lock).splitlines()]
    return tuple(line for line in lines if line)


def check_lock(request: EnvironmentRequest) -> None:
    """Check that the lock has every requirement, and digests where the packages need them. Raises EnvironmentBuildError."""
    if request.packages != "standard" and not all("--hash=sha256:" in line for line in request.constraints):
        raise EnvironmentBuildError(
            f"python_flavour is {request.packages}: its python_lock needs a digest for every package, as "
            f"{FLAVOURS[request.packages]} has"
        )
    pinned = {normal_name(line) for line in request.constraints}
    missing = [line for line in request.requirements if normal_name(line) not in {*pinned, *NOT_LOCKED}]
    if missing:
        raise EnvironmentBuildError(
            f"python_lock does not have {', '.join(missing)}: omit the python_extras that need it, or add it to the lock"
        )


def normal_name(requirement: str) -> str:
    """Return the name in a requirement as package indexes compare it: ``PyYAML>=6`` is ``pyyaml``."""
    match = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def check_unsloth(infos: Mapping[str, Mapping[str, Any]], flavour: str) -> None:
    """Check that the hosts can have the environment of unsloth, whose torch is the newest CUDA build.

    `infos`: what `python_env_info` returned, by host. `flavour`: the build of torch that drivers and GPUs support. Raises
    EnvironmentBuildError: no host has a GPU, or a host has an old driver or an old GPU.
    """
    build, driver, capability, _ = BUILDS[0]
    if flavour != build:
        found = ", ".join(f"{host}: driver {info['driver']}" for host, info in infos.items() if info["driver"])
        raise EnvironmentBuildError(
            f"python_flavour is unsloth, whose torch ({build}) requires an NVIDIA driver {driver} or newer and a compute "
            f"capability of {capability:g} or higher ({found or 'no host has a driver'}): install the driver, or set "
            "python_flavour: standard"
        )


def conda_lock(path: str, folder: Path) -> str:
    """Return the text of a conda lock; by default of conda.lock in `folder`, or empty without. Raises EnvironmentBuildError."""
    if not path:
        path = str(folder / CONDA_LOCK) if (folder / CONDA_LOCK).exists() else ""
    try:
        return _read("python_conda_lock", user_path(path, "python_conda_lock")) if path else ""
    except UserError as error:
        raise EnvironmentBuildError(str(error)) from None


def _read(option: str, path: Path) -> str:
    try:
        return read_regular(path, _MAX_LOCK).decode()
    except OSError as error:
        raise EnvironmentBuildError(f"{option}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EnvironmentBuildError(f"{option}: {path} is not UTF-8 text") from None


def choose_flavour(requested: str, infos: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the build of torch for all hosts.

    Ranks with different builds cannot train together, so there is one build for all. A host without a GPU also runs a
    CUDA build. Raises EnvironmentBuildError: no build supports all of them. `requested`: a build, or "auto" for the
    preferred one that all drivers and GPUs support (cpu without any driver). `infos`: for each host `driver` and
    `capabilities` as `python_env_info` returns them.
    """
    drivers = {host: info["driver"] for host, info in infos.items() if info["driver"]}
    if requested != "auto" or not drivers:
        return "cpu" if requested == "auto" else requested
    capabilities = [float(capability) for info in infos.values() for capability in info["capabilities"]]
    for build, oldest, first, last in BUILDS:
        supported = all(first <= capability <= last for capability in capabilities)
        if supported and all(major(driver) >= oldest for driver in drivers.values()):
            return build
    host, driver = min(drivers.items(), key=lambda entry: major(entry[1]))
    raise EnvironmentBuildError(
        f"no build of torch supports all GPUs (compute capability {', '.join(map(str, sorted(set(capabilities))))}) and "
        f"drivers (the oldest is {driver} on {host}): upgrade that driver, exclude a host, or set python_torch_flavour"
    )


def major(version: str) -> int:
    """Return the first number of a version: 580 for 580.65.06, and 0 without a number."""
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


def conda_packages(text: str) -> list[dict[str, str]]:
    """Return `url`, `file`, `digest` and `subdir` of every package in an explicit conda lock.

    `text`: the output of `conda list --explicit --sha256`. Raises EnvironmentBuildError: a line is neither a package
    with its digest nor a comment.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#") or line == "@EXPLICIT":
            continue
        match = CONDA_LINE.match(line)
        if not match:
            expected = "URL#sha256 of a package, as in conda list --explicit --sha256"
            raise EnvironmentBuildError(f"python_conda_lock: line {number}: expected {expected}")
        found.append(match.groupdict() | {"subdir": match["url"].rsplit("/", 2)[1]})
    return found


def conda_python(packages: Sequence[Mapping[str, str]]) -> str:
    """Return the version of Python in a conda lock. Raises EnvironmentBuildError."""
    for package in packages:
        if match := re.match(r"python-(\d+\.\d+\.\d+)-", package["file"]):
            return match[1]
    raise EnvironmentBuildError("python_conda_lock: the lock has no package python")
