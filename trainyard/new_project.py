"""Make the folder of a project: `trainyard init`."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainyard.project_folder import LINK, is_checkout, package_version, shared_folder

_GITIGNORE = "/.trainyard/\n/runs/\n/store/\n/deployed/\n"  # what runs and playbooks write
_COPIED = ("group_vars/all/*.yml", "inventory/*.yml")
_IMPORTED = ("site.yml", "train.yml", "playbooks/*.yml")
_OF_CHECKOUT = re.compile(r"inventory/(hosts|lab.*)\.yml")  # that a user of a checkout has written
_GROUP_VARS = "playbooks/group_vars"  # a link: Ansible reads those beside the playbook

# Without torch, this machine cannot be a host of the default inventory.
_FIRST = (
    "trainyard train --model tiny"
    if importlib.util.find_spec("torch")
    else "cp inventory/hosts.example.yml inventory/hosts.yml, name your machines in it, and trainyard site -i inventory/hosts.yml"
)


def make_project(folder: Path, check: bool) -> dict[str, Any]:
    """Write what is missing in the folder of a project. Files that exist stay as they are.

    Returns the names of the files `written` and those `kept` although they differ. Raises UserError: the folder is a
    checkout, or cannot be written.
    """
    folder, package = folder.absolute(), shared_folder()
    if is_checkout(folder):
        raise UserError(f"{folder} is a checkout of trainyard, which is a project already: name another folder")
    texts = project_files(package)
    new = [name for name in texts if not _is_there(folder / name)]
    kept = [name for name, text in texts.items() if name not in new and _differs(folder / name, text)]
    links = {LINK: str(package), _GROUP_VARS: "../group_vars"}
    to_link = [name for name in links if not _is_there(folder / name)]
    if _is_there(folder / LINK) and (folder / LINK).resolve() != package:
        to_link.append(LINK)
    if not check:
        try:
            for name in new:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / name, texts[name].encode())
            for name in to_link:
                _write_link(folder / name, links[name])
        except OSError as error:
            raise UserError(f"cannot write the project to {folder}: {error.strerror}: {error.filename}") from None
    written, version = sorted([*new, *to_link]), package_version()
    tops = Counter(name.partition("/")[0] for name in written)
    verb = "would write" if check else "wrote"
    lines = [f"{verb} {name}{f' ({count} files)' if count > 1 else ''}" for name, count in tops.items()]
    differs = f"which differs from that of trainyard {version}: remove it to get the new one"
    lines += [f"kept {name}, {differs}" for name in kept]
    lines += [] if written or kept else [f"{folder} is a project of trainyard {version} already"]
    lines += [f"next: cd {shlex.quote(str(folder))} && {_FIRST}"] if new and not check else []
    return {"changed": bool(written), "folder": str(folder), "written": written, "kept": kept, "lines": lines}


def project_files(package: Path) -> dict[str, str]:
    """Return {name: text} of the files of a project that uses the playbooks and roles in the folder `package`."""
    configuration = (package / "ansible.cfg").read_text(encoding="utf-8")
    texts = {"ansible.cfg": re.sub(r"= (plugins/|roles$)", rf"= {LINK}/\1", configuration, flags=re.MULTILINE)}
    texts[".gitignore"] = _GITIGNORE
    for name in _names(package, _COPIED):
        texts[name] = (package / name).read_text(encoding="utf-8")
    for name in _names(package, _IMPORTED):
        _, *lines = (package / name).read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        path = os.path.relpath(f"{LINK}/{name}", Path(name).parent)
        play = [f"- name: Run {name} of the installed package", f"  ansible.builtin.import_playbook: {path}"]
        texts[name] = "\n".join(["---", *comment, *play, ""])
    return texts


def _names(package: Path, patterns: tuple[str, ...]) -> list[str]:
    found = (str(path.relative_to(package)) for pattern in patterns for path in sorted(package.glob(pattern)))
    return [name for name in found if not _OF_CHECKOUT.fullmatch(name)]


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _differs(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() != text.encode()
    except OSError:  # a folder, for example
        return True


def _write_link(path: Path, target: str) -> None:
    """Write a link in place of another one. Raises OSError for a file or folder of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    path.symlink_to(target)
