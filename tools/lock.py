"""Pin the packages of every flavour: constraints.txt, constraints-unsloth.txt and constraints-gpu.txt.

    python tools/lock.py [--upgrade] [FLAVOUR...]     standard, unsloth, gpu; without a name all of them

uv resolves the versions for Linux on x86_64; a file with digests also has those of aarch64. It reads metadata only and downloads no
wheels. Present pins stay, so that a new requirement changes no other package. --upgrade takes the newest versions, but for the packages in HELD.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.wheels import PACKAGES, PYTHONS, SOURCE
from trainyard.python_env.resolve import MACHINES, normal_name, requirements

TOP = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28"
HELD = ("torch", "liger-kernel", "torchft", "gguf")  # the code uses their internals: change the pin, and run all tests
# The first version of Python for which the pinned release was not made.
NEWER = {"ansible-core": "3.14"}
# torch brings those that its build needs. pip is that of the environment.
OF_TORCH = re.compile(r"triton|(cuda|nvidia)-(?!ml-py)")
EXTRAS = ("dashboard", "node", "mlflow", "notify", "wandb", "nvml", "gpu", "deepspeed", "dev", "bench")


@dataclass(frozen=True)
class Flavour:
    """One file of pins.

    Attributes:
        file: its name.
        about: its comment.
        wanted: the requirements.
        complete: whether it lists all packages, and has their digests.
        same: a file whose pins it repeats, without dependencies of its own.
    """

    file: str
    about: str
    wanted: list[str]
    complete: bool = True
    same: str = ""


@dataclass
class Pins:
    """The versions of a package by the first Python that has each, the digests of its files, and the architectures that need it."""

    versions: dict[str, str] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    machines: set[str] = field(default_factory=set)

    def lines(self, name: str, machines: Sequence[str]) -> list[str]:
        """Return the lines of a file for these architectures."""
        hashes = "".join(f" --hash=sha256:{digest}" for digest in sorted(self.digests))
        firsts = [*self.versions, ""]
        lines = []
        for first, after in itertools.pairwise(firsts):
            limits = [f"python_version >= '{first}'"] * (first != firsts[0]) + [f"python_version < '{after}'"] * bool(
                after
            )
            limits += [f"platform_machine == '{machine}'" for machine in self.machines if self.machines < set(machines)]
            marker = f"; {' and '.join(limits)}" if limits else ""
            lines.append(f"{name}=={self.versions[first]}{marker}{hashes}")
        return lines


def flavours() -> dict[str, Flavour]:
    """Return the flavours by name."""
    pyproject = TOP / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    standard = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name]), "setuptools", "wheel"]
    return {
        "standard": Flavour(
            "constraints.txt",
            "of all packages. torch has no local version part, so that an installer takes the CPU build where one is offered.",
            standard,
            complete=False,
        ),
        "unsloth": Flavour(
            "constraints-unsloth.txt",
            "and digests of the environment python_flavour=unsloth. torch is the build of the package index.",
            list(requirements(pyproject, ["unsloth", "nvml"], torch=True)),
        ),
        "gpu": Flavour(
            "constraints-gpu.txt",
            "and digests of what make test-gpu installs besides torch.",
            PACKAGES,
            same="constraints.txt",
        ),
    }


def read_pins(file: str) -> dict[str, str]:
    """Return {package: version} of a file of pins, for the oldest Python."""
    found: dict[str, str] = {}
    for line in (TOP / file).read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==([^\s;]+)", line):
            found.setdefault(normal_name(match[1]), match[2])
    return found


def resolve(flavour: Flavour, machine: str, python: str, pinned: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """Return the packages of a flavour for one version of Python, as a pylock has them. `pinned`: versions to keep."""
    (folder / "requirements.in").write_text("\n".join(flavour.wanted), encoding="utf-8")
    kept = [f"{name}=={version}" for name, version in pinned.items() if python < NEWER.get(name, "4")]
    (folder / "pinned.txt").write_text("\n".join(kept), encoding="utf-8")
    target = folder / f"pylock.{python.replace('.', '-')}.toml"
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    uv = Path(sys.executable).with_name("uv")
    command: list[str | Path] = [uv, "pip", "compile", "--quiet", "--no-config", "--format=pylock.toml"]
    command += [f"--python-version={python}", f"--python-platform={machine}-{PLATFORM}", "--only-binary=:all:"]
    command += [f"--no-binary={SOURCE}", *(["--no-deps"] if flavour.same else [])]
    command += ["--constraints", folder / "pinned.txt", "--output-file", target, folder / "requirements.in"]
    subprocess.run(command, check=True, env=os.environ | {"UV_DEFAULT_INDEX": index})
    packages: list[dict[str, Any]] = tomllib.loads(target.read_text(encoding="utf-8"))["packages"]
    return packages


def lock(flavour: Flavour, upgrade: bool) -> int:
    """Write the file of a flavour; return the number of packages."""
    held = {name: version for name, version in read_pins("constraints.txt").items() if name in HELD}
    present = read_pins(flavour.same or flavour.file) if flavour.same or not upgrade else {}
    machines = MACHINES if flavour.complete else MACHINES[:1]
    found: dict[str, Pins] = {}
    with tempfile.TemporaryDirectory() as folder:
        pinned = present | held
        for machine, python in itertools.product(machines, PYTHONS):
            for package in resolve(flavour, machine, python, pinned, Path(folder)):
                name, version = package["name"], package["version"]
                pins = found.setdefault(name, Pins())
                pins.machines.add(machine)
                if version not in pins.versions.values():
                    pins.versions[python] = version
                files = [*package.get("wheels", []), *([package["sdist"]] if name == SOURCE else [])]
                pins.digests |= {file["hashes"]["sha256"] for file in files if flavour.complete}
                pinned = {name: version, **pinned}
    if not flavour.complete:
        found = {name: pins for name, pins in found.items() if name != "pip" and not OF_TORCH.match(name)}
    lines = [line for name in sorted(found) for line in found[name].lines(name, machines)]
    about = f"# Pinned versions {flavour.about}\n"
    supported = (
        f"# Linux on {' and '.join(machines)}, CPython {PYTHONS[0]} to {PYTHONS[-1]}. 'make lock' writes this file.\n"
    )
    (TOP / flavour.file).write_text("\n".join([about + supported.rstrip(), *lines, ""]), encoding="utf-8")
    return len(found)


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("names", nargs="*", metavar="FLAVOUR", help="standard, unsloth or gpu")
    given = parser.parse_args()
    known = flavours()
    if unknown := set(given.names) - set(known):
        parser.error(f"unknown flavour {', '.join(sorted(unknown))}: expected {', '.join(known)}")
    for name in given.names or known:
        try:
            print(f"wrote {known[name].file}: {lock(known[name], given.upgrade)} packages", flush=True)
        except subprocess.CalledProcessError:
            print(
                f"error: {known[name].file}: uv found no versions: see the lines above, or add --upgrade",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
