#!/usr/bin/python
"""Exchange a model between an Ollama store and a folder of the login user."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ollama_staging
short_description: Exchange a model between an Ollama store and a folder of the login user
description:
  - The login user of a host cannot read every store, and cannot write to it. This module runs as root. It links the files of a model
    to a folder of that user, and moves what has arrived there to a store.
  - It writes to a store as the owner of the store, after it has compared the SHA-256 of every file.
options:
  state:
    description:
      - V(exported) makes O(folder) with the files of the model, as hard links where that is possible.
      - V(prepared) makes an empty O(folder).
      - V(imported) copies the files of the model from O(folder) to the store, blobs before the manifest.
      - V(absent) removes O(folder).
    type: str
    choices: [exported, prepared, imported, absent]
    required: true
  folder:
    description: Folder for the exchange. V(exported) and V(prepared) remove an earlier one. Only root may be able to redirect its path.
    type: path
    required: true
  owner:
    description: User who owns the folder.
    type: str
  path:
    description: Folder of the store, as in C(OLLAMA_MODELS).
    type: path
  model:
    description: Name of the model as C(ollama pull) accepts it.
    type: str
  files:
    description: For V(imported) the RV(ollama_store#module:models) entry of the model on its source.
    type: dict
extends_documentation_fragment: [trainyard, trainyard.files]
"""

EXAMPLES = r"""
- name: Link the model to a folder of the login user
  ollama_staging:
    state: exported
    folder: /var/lib/trainyard/ollama-copy
    owner: "{{ ansible_user }}"
    path: /var/lib/ollama
    model: llama3.2:1b
  become: true
"""

RETURN = r"""
model:
  description: C(manifest), C(digest), C(blobs) and C(sizes) of the exported model, as of M(ollama_store).
  returned: state is exported
  type: dict
"""

import hashlib
import os
import pwd
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ansible.module_utils.acting_as import acting_as
from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ollama_files import is_valid, read_model
from ansible.module_utils.safe_path import check_path

BLOCK = 1 << 20  # bytes
STORE = "store"  # the files are below it, as in a data directory: trainyard/remote/relay.py opens nothing else
INCOMING = f"{STORE}/incoming"  # where trainyard/wire/host_relay.py writes


def remove(folder: Path) -> bool:
    """Remove the folder; return whether it existed. Raises OSError."""
    if not os.path.lexists(folder):
        return False
    shutil.rmtree(folder)
    return True


def prepare(folder: Path, owner: pwd.struct_passwd) -> None:
    """Recreate the folder for its owner alone. Raises OSError."""
    remove(folder)
    folder.mkdir(parents=True, mode=0o700)
    (folder / INCOMING).mkdir(parents=True)
    for path in (folder / INCOMING, (folder / INCOMING).parent, folder):
        os.chown(path, owner.pw_uid, owner.pw_gid)


def export(store: Path, model: dict[str, Any], folder: Path, owner: pwd.struct_passwd) -> None:
    """Make the folder with the files of a model. Raises OSError."""
    prepare(folder, owner)
    os.chown(folder, 0 if os.geteuid() == 0 else -1, -1)  # until it is complete
    for name in model["sizes"]:
        target = folder / STORE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(store / name, target, follow_symlinks=False)
            mode = target.lstat().st_mode
        except OSError:  # another file system
            mode = 0
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            continue
        target.unlink(missing_ok=True)
        with open_regular(store / name) as source, target.open("xb") as copied:
            shutil.copyfileobj(source, copied, BLOCK)
        target.chmod(0o644)
    os.chown(folder, owner.pw_uid, owner.pw_gid)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file that is not a link. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def install(folder: Path, store: Path, model: dict[str, Any]) -> bool:
    """Copy the files that a store lacks from the folder, as the owner of the store; return whether there were any.

    Raises:
        OSError: a file is missing or cannot be written.
        ValueError: a file is damaged.
    """
    owner = pwd.getpwuid(store.stat().st_uid)
    if owner.pw_uid == 0:
        check_path(store)
    wanted = {blob: blob.rpartition("sha256-")[2] for blob in model["blobs"]} | {model["manifest"]: model["digest"]}
    changed = False
    for name, digest in wanted.items():  # the manifest is the last one: it makes the model visible
        target = store / name
        if target.exists() and (name != model["manifest"] or sha256(target) == digest):
            continue
        with open_regular(folder / STORE / name) as source, acting_as(owner):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.trainyard")
            temporary.unlink(missing_ok=True)
            try:
                copy(source, temporary, digest)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
        changed = True
    return changed


def copy(source: BinaryIO, target: Path, digest: str) -> None:
    """Copy to a new file. Raises OSError, or ValueError if the SHA-256 differs."""
    found = hashlib.sha256()
    with target.open("xb") as file:
        while block := source.read(BLOCK):
            found.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    target.chmod(0o644)
    if found.hexdigest() != digest:
        raise ValueError(f"{target.name} arrived damaged: run the playbook again")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a small file in hex. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Reach the state; return the result. Raises OSError, ValueError or KeyError for an unknown user."""
    state, folder = params["state"], Path(params["folder"])
    os.umask(0o022)
    check_path(folder)
    if check:
        return {"changed": state != "absent" or folder.exists()}
    if state == "absent":
        return {"changed": remove(folder)}
    if state == "imported":
        name, model = params["model"], params["files"]
        if not is_valid(name, model):
            raise ValueError(f"the source reports invalid paths for the model {name!r}: check its Ollama store")
        return {"changed": install(folder, Path(params["path"]), model)}
    owner = pwd.getpwnam(params["owner"])
    if state == "prepared":
        prepare(folder, owner)
        return {"changed": True}
    found = read_model(Path(params["path"]), params["model"])
    if not found:
        raise ValueError(f"{params['path']} has no complete model {params['model']}: set ollama_models")
    export(Path(params["path"]), found, folder, owner)
    return {"changed": True, "model": found}


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(DOCUMENTATION),
        supports_check_mode=True,
        required_if=[
            ("state", "exported", ["owner", "path", "model"]),
            ("state", "prepared", ["owner"]),
            ("state", "imported", ["path", "model", "files"]),
        ],
    )
    try:
        result = run(module.params, module.check_mode)
    except KeyError:
        module.fail_json(msg=f"there is no user {module.params['owner']}", plain=True)
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['folder']}: {error.strerror or error}", plain=True)
    except ValueError as error:
        module.fail_json(msg=str(error), plain=True)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
