"""The project: the folder with Ansible's configuration, the inventory and the state; and the playbooks and roles that it uses."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path

from trainer.common.errors import UserError

COLLECTION = "trainyard.cluster"  # tools/collection.py builds it
SHARE = "share"  # in an installed package, the folder of what a checkout has beside it; setup.py fills it
LINK = ".trainyard/package"  # in the folder that `trainyard init` has made, leads to that folder
_PACKAGE = Path(__file__).resolve().parent


def shared_folder() -> Path:
    """Return the folder with the playbooks, roles, plugins and pinned versions: in the installed package, or the checkout."""
    installed = _PACKAGE / SHARE
    return installed if installed.is_dir() else _PACKAGE.parent


def package_version() -> str:
    """Return the version of this package, of a checkout without its metadata, too."""
    version: str = tomllib.loads((shared_folder() / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def project_folder(config: str = "", any_folder: bool = False) -> Path:
    """Return the folder of the project: that of Ansible's configuration, the current one, or the checkout of this package.

    Args:
        config: the configuration that Ansible reads; empty for that which ANSIBLE_CONFIG names.
        any_folder: the playbooks are not those of the folder, but of a collection, so that any folder can be a project.

    Raises:
        UserError: there is none, or the project belongs to another installation.
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
                    f"{folder}: all users can write to it, so Ansible ignores its ansible.cfg: chmod o-w {folder}"
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
            f"{package_version()}: pip install trainyard=={version}"
        )


def is_checkout(folder: Path) -> bool:
    """Return whether a folder is a checkout of trainyard, which is a project itself."""
    return (folder / "roles/cluster").is_dir() and (folder / "trainyard").is_dir()


def _check_link(folder: Path) -> None:
    """Check that the playbooks of a project are those of this package. Raises UserError."""
    if (folder / LINK).resolve() != shared_folder():
        target = (folder / LINK).readlink()
        raise UserError(
            f"{folder} uses the playbooks in {target}, but this is the program of {shared_folder()}: run trainyard init {folder}"
        )
