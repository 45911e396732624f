"""The collection trainyard.cluster, built from this checkout and installed in a folder."""

import os
import subprocess
import sys
from pathlib import Path

from tools import collection

CONFIG = """\
[defaults]
gathering = explicit
inject_facts_as_vars = False
stdout_callback = trainyard.cluster.trainyard
local_tmp = ~/.ansible/tmp
[inventory]
enable_plugins = host_list, auto, yaml, ini
[connection]
pipelining = True
"""


def installed_collection(folder: Path) -> dict[str, str]:
    """Build and install the collection. Returns the environment in which Ansible uses it, and nothing of the checkout's configuration."""
    subprocess.run([sys.executable, "-m", "tools.collection", folder], cwd=collection.TOP, check=True)
    (archive,) = folder.glob("trainyard-cluster-*.tar.gz")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    environment = {"ANSIBLE_COLLECTIONS_PATH": str(folder / "collections")}
    install = [galaxy, "collection", "install", "--offline", "-p", folder / "collections", archive]
    subprocess.run(install, env=os.environ | environment, check=True)
    (folder / "ansible.cfg").write_text(CONFIG, encoding="utf-8")
    own = {"ANSIBLE_CONFIG": str(folder / "ansible.cfg"), "ANSIBLE_CALLBACK_PLUGINS": "", "ANSIBLE_ROLES_PATH": ""}
    return environment | own | {"ANSIBLE_STDOUT_CALLBACK": "trainyard.cluster.trainyard"}
