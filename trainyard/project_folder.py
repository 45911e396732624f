"""The project: the folder with Ansible's configuration, the inventory and the state; and the playbooks and roles that it uses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from trainer.common.errors import UserError

COLLECTION = "trainyard.cluster"  # tools/collection.py builds it
SHARE = "share"  # in an installed package, the folder of what a checkout has beside it; setup.py fills it
LINK = ".trainyard/package"  # in the folder that `trainyard init` has made, leads to that folder
FOREIGN = (
    "{python} has the package trainyard {version} of the package index, which is another project and has files of the same names: "
    "{python} -m pip uninstall trainyard, then install this project again"
)
_PACKAGE = Path(__file__).resolve().parent


def shared_folder() -> Path:
    """Return the folder with the playbooks, roles, plugins and pinned versions: in the installed package, or the checkout."""
    installed = _PACKAGE / SHARE
    return installed if installed.is_dir() else _PACKAGE.parent


def package_version() -> str:
    """Return the version of this package, of a checkout without its metadata, too."""
    version: str = tomllib.loads((shared_folder() / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def pip_install(names: Iterable[str]) -> str:
    """Return the command that installs packages into the environment of this process, in the versions of constraints.txt.

    The distribution of this project is named itself by no command: it is installed from a checkout, or from the file of a wheel.
    """
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    pins: dict[str, str] = {}
    for line in (shared_folder() / "constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([\w.-]+)(==[^\s;]+)(?:.*python_(?:full_)?version < '(3\.\d+)')?", line)
        if match and (not match[3] or _number(running) < _number(match[3])):
            pins.setdefault(match[1], match[2])
    return " ".join([sys.executable, "-m", "pip", "install", *(f"{name}{pins.get(name, '')}" for name in names)])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def foreign_package() -> str:
    """Return the version of the distribution `trainyard` of the package index, another project, in this environment, or an empty string.

    It has a package of the same name. Earlier versions of ours were distributed as `trainyard`, too; these have the package `trainer`.
    """
    for found in importlib.metadata.distributions(name="trainyard"):
        files = {str(file) for file in found.files or ()}
        if "trainyard/__init__.py" in files and "trainer/__init__.py" not in files:
            return found.version
    return ""


def project_folder(config: str = "", any_folder: bool = False) -> Path:
    """Return the folder of the project: that of Ansible's configuration, the current one, or the checkout of this package.

    `config`: the configuration that Ansible reads; empty for that which ANSIBLE_CONFIG names. `any_folder`: the
    playbooks are not those of the folder, but of a collection, so that any folder can be a project. Raises UserError:
    there is none, or the project belongs to another installation.
    """
    config = config or os.environ.get("ANSIBLE_CONFIG", "")
    current = Path.cwd()
    given = [Path(config) if Path(config).is_dir() else Path(config).absolute().parent] if config else []
    for folder in (*given, current, shared_folder()):
        if is_checkout(folder):
            return folder
        if (folder / LINK).is_symlink():
            if folder not in given and folder.stat().st_mode & stat.S_IWOTH:
                raise UserError(
                    f"{folder}: all users can write to it, so Ansible ignores ansible.cfg: chmod o-w {folder}"
                )
            _check_link(folder)
            return folder
        if any_folder and not folder.stat().st_mode & stat.S_IWOTH:
            return folder
    raise UserError(f"{current} is no project: run trainyard init, or cd to the folder in which you ran it")


def check_collection(plugin: Path) -> None:
    """Check that the collection to which a plugin belongs has the version of this package. Raises UserError."""
    manifest = json.loads((plugin.parents[2] / "MANIFEST.json").read_text(encoding="utf-8"))
    if (version := manifest["collection_info"]["version"]) != package_version():
        raise UserError(
            f"the collection {COLLECTION} {version} needs the package of the same version, and Ansible's Python has trainyard "
            f"{package_version()}: {sys.executable} -m pip install trainyard_cluster-{version}-py3-none-any.whl, from `make dist` of that version"
        )


def is_checkout(folder: Path) -> bool:
    """Return whether a folder is a checkout of trainyard, which is a project itself."""
    return (folder / "roles/cluster").is_dir() and (folder / "trainyard").is_dir()


def _check_link(folder: Path) -> None:
    """Check that the playbooks of a project are those of this package. Raises UserError."""
    if (folder / LINK).resolve() != shared_folder():
        what = (
            f"{folder} uses the playbooks in {(folder / LINK).readlink()}, but this is the program of {shared_folder()}"
        )
        raise UserError(f"{what}: run trainyard init {folder}")
