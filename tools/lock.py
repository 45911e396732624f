"""Pin the packages of every flavour with digests: constraints.txt, constraints-unsloth.txt and constraints-gpu.txt.

    python tools/lock.py [--upgrade] [FLAVOUR...]     standard, unsloth, gpu; without a name all of them

uv resolves the versions for all machines at once (`tool.uv` in pyproject.toml). It reads metadata only and downloads no wheels. Present
pins stay, so that a new requirement changes no other package. --upgrade takes the newest versions, but for the packages in HELD.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.wheels import PACKAGES, PYTHONS, SOURCE
from trainyard.python_env.resolve import MACHINES, normal_name, requirements
from trainyard.python_env.uv_settings import TORCH_INDEX, environment_of_uv

TOP = Path(__file__).resolve().parents[1]
HELD = ("torch", "liger-kernel", "gguf")  # the code uses their internals: change the pin, and run all tests
# torch brings those that its build needs, of the index that has it. pip is that of the environment.
OF_TORCH = re.compile(r"triton|(cuda|nvidia)-(?!ml-py)")
EXTRAS = ("dashboard", "node", "mlflow", "wandb", "nvml", "gpu", "deepspeed", "dev", "bench")
BUILDS = ("cpu", "cu126", "cu128", "cu129", "cu130", "cu132")  # of torch, on its own index
BUILD = r"torch-{version}%2B{build}-(cp3\d+)-\1-manylinux_2_28_(?:{machines})\.whl[^\"'>]*#sha256=([0-9a-f]{{64}})"
TAG = "|".join(f"cp{python.replace('.', '')}" for python in PYTHONS)
WHEEL = re.compile(
    rf"-((py[\w.]+)-none|cp3\d+-abi3|({TAG})-(none|{TAG}))-(any|[\w.]*manylinux[\w.]*_({'|'.join(MACHINES)})|linux_({'|'.join(MACHINES)}))\.whl$"
)
PYTHON = re.compile(r"python_full_version (<|>=|==) '(3\.\d+)(?:\.\*)?'")


@dataclass(frozen=True)
class Flavour:
    """One file of pins.

    Attributes:
        file: its name.
        about: its comment.
        wanted: the requirements.
        complete: whether it lists all packages, those of torch too.
        same: a file whose pins it repeats, without dependencies of its own.
    """

    file: str
    about: str
    wanted: list[str]
    complete: bool = True
    same: str = ""


@dataclass
class Pins:
    """The versions of a package with their markers, and the digests of its files."""

    versions: dict[str, str] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file."""
        hashes = "".join(f" --hash=sha256:{digest}" for digest in sorted(self.digests))
        return [
            f"{name}=={version}{f'; {marker}' if marker else ''}{hashes}" for version, marker in self.versions.items()
        ]


def flavours() -> dict[str, Flavour]:
    """Return the flavours by name."""
    pyproject = TOP / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    standard = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name]), "setuptools", "wheel"]
    return {
        "standard": Flavour(
            "constraints.txt", "and digests of all packages but those that torch brings.", standard, False
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


def read_lines(file: str) -> dict[str, list[str]]:
    """Return the lines of a file of pins by package, without digests."""
    found: dict[str, list[str]] = {}
    for line in (TOP / file).read_text(encoding="utf-8").splitlines():
        if re.match(r"[\w.-]+==", line):
            found.setdefault(normal_name(line), []).append(line.partition(" --hash=")[0])
    return found


def read_pins(file: str) -> dict[str, str]:
    """Return {package: version} of a file of pins, for the oldest Python."""
    return {name: lines[0].partition("==")[2].partition(";")[0] for name, lines in read_lines(file).items()}


def resolve(flavour: Flavour, pinned: dict[str, list[str]], folder: Path) -> list[dict[str, Any]]:
    """Return the packages of a flavour for all machines, as a pylock has them. `pinned`: lines to keep."""
    (folder / "requirements.in").write_text("\n".join(flavour.wanted), encoding="utf-8")
    (folder / "pinned.txt").write_text("\n".join(line for lines in pinned.values() for line in lines), encoding="utf-8")
    target = folder / "pylock.toml"
    uv = Path(sys.executable).with_name("uv")
    command: list[str | Path] = [uv, "pip", "compile", "--quiet", "--universal", f"--python-version={PYTHONS[0]}"]
    command += ["--format=pylock.toml", "--only-binary=:all:", f"--no-binary={SOURCE}"]
    command += ["--no-deps"] if flavour.same else []
    command += ["--constraints", folder / "pinned.txt", "--output-file", target, folder / "requirements.in"]
    # The indexes of torch and of this machine would change what the lock says of a package.
    subprocess.run(command, check=True, cwd=TOP, env=environment_of_uv(only=("UV_DEFAULT_INDEX", "SSL_CERT_FILE")))
    packages: list[dict[str, Any]] = tomllib.loads(target.read_text(encoding="utf-8"))["packages"]
    return packages


def marker_of(package: dict[str, Any], several: bool) -> str:
    """Return the marker of a line: the versions of Python, where a package has several lines, and the only machine."""
    found = package.get("marker", "")
    after = f"3.{int(PYTHONS[-1].partition('.')[2]) + 1}"
    limits = [
        f"python_version {sign} '{python}'" for sign, python in PYTHON.findall(found) if several and python != after
    ]
    named = [machine for machine in MACHINES if f"'{machine}'" in found]
    return " and ".join(limits + [f"platform_machine == '{machine}'" for machine in named if len(named) == 1])


def torch_digests(version: str) -> dict[str, set[str]]:
    """Return the digests of torch's wheels by build, from its own index; of the builds that it has of this version."""
    found: dict[str, set[str]] = {}
    for build in BUILDS:
        try:
            with urllib.request.urlopen(f"{TORCH_INDEX}/{build}/torch/", timeout=20) as reply:
                page = reply.read().decode()
        except urllib.error.HTTPError:  # there is no such build
            continue
        pattern = BUILD.format(version=re.escape(version), build=build, machines="|".join(MACHINES))
        digests = {digest for python, digest in re.findall(pattern, page) if f"3.{python[3:]}" in PYTHONS}
        found |= {build: digests} if digests else {}
    return found


def add_builds(pins: Pins, held: str) -> str:
    """Add the digests of torch's builds; return their names. `held`: the text of the present file, for where the index is not reached."""
    try:
        builds = torch_digests(next(iter(pins.versions)))
    except OSError as error:
        print(f"{TORCH_INDEX} does not answer ({error}): the digests of torch's builds stay", file=sys.stderr)
        line = re.search(rf"^torch=={re.escape(next(iter(pins.versions)))}( .*)$", held, re.MULTILINE)
        pins.digests |= set(re.findall(r"sha256:(\w+)", line[1])) if line else set()
        names = re.search(r"^# Builds of torch: (.*)\.$", held, re.MULTILINE)
        return names[1] if names and line else ""
    pins.digests |= set().union(*builds.values())
    return " ".join(builds)


def lock(flavour: Flavour, upgrade: bool) -> int:
    """Write the file of a flavour; return the number of packages."""
    held = {name: lines for name, lines in read_lines("constraints.txt").items() if name in HELD}
    present = read_lines(flavour.same or flavour.file) if flavour.same or not upgrade else {}
    with tempfile.TemporaryDirectory() as folder:
        packages = resolve(flavour, present | held, Path(folder))
    names = [package["name"] for package in packages]
    found: dict[str, Pins] = {}
    for package in packages:
        name = package["name"]
        if not flavour.complete and (name == "pip" or OF_TORCH.match(name)):
            continue
        pins = found.setdefault(name, Pins())
        pins.versions[package["version"]] = marker_of(package, names.count(name) > 1)
        wheels = [file for file in package.get("wheels", []) if WHEEL.search(file.get("name") or file["url"])]
        files = [*wheels, *([package["sdist"]] if name == SOURCE else [])]
        pins.digests |= {file["hashes"]["sha256"] for file in files}
    about = [f"# Pinned versions {flavour.about}"]
    about += [
        f"# Linux on {' and '.join(MACHINES)}, CPython {PYTHONS[0]} to {PYTHONS[-1]}. 'make lock' writes this file."
    ]
    if not flavour.complete and (
        builds := add_builds(found["torch"], (TOP / flavour.file).read_text(encoding="utf-8"))
    ):
        about.append(f"# Builds of torch: {builds}.")
    lines = [line for name in sorted(found) for line in found[name].lines(name)]
    (TOP / flavour.file).write_text("\n".join([*about, *lines, ""]), encoding="utf-8")
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
