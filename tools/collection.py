"""Build the Ansible collection trainyard.cluster from this checkout.

    python tools/collection.py FOLDER

FOLDER gets trainyard-cluster-VERSION.tar.gz. In a collection, plugins and filters have full names, and module_utils another package.
The Python package is not part of it: Ansible's Python has the same version of trainyard.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import ansible.release
import yaml

from trainyard.project_folder import COLLECTION

TOP = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = """\
# trainyard.cluster

{description}

The roles, playbooks and plugins of trainyard as a collection. Ansible's Python needs the package of the same version:

    python -m pip install trainyard_cluster-{version}-py3-none-any.whl
    ansible-galaxy collection install trainyard-cluster-{version}.tar.gz
    ansible-playbook -i inventory.yml trainyard.cluster.site
    ansible-playbook -i inventory.yml trainyard.cluster.train -e model=tiny

docs/site.md of the project says what the inventory and ansible.cfg have.
"""


def write_collection(folder: Path) -> None:
    """Write the files of the collection to a folder that does not exist yet."""
    for name in ("roles", "plugins"):
        shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "playbooks").mkdir()
    for path in (TOP / "site.yml", TOP / "train.yml", *(TOP / "playbooks").glob("*.yml")):
        text = re.sub(r"(import_playbook: )(playbooks|\.\.)/", r"\1", path.read_text(encoding="utf-8"))
        (folder / "playbooks" / path.name).write_text(text, encoding="utf-8")
    shutil.copy(TOP / "LICENSE", folder)
    (folder / "README.md").write_text(README.format(**PYPROJECT), encoding="utf-8")
    (folder / "meta").mkdir()
    core = next(each for each in PYPROJECT["dependencies"] if each.startswith("ansible-core")).removeprefix(
        "ansible-core"
    )
    (folder / "meta/runtime.yml").write_text(f'---\nrequires_ansible: "{core}.0"\n', encoding="utf-8")
    namespace, name = COLLECTION.split(".")
    galaxy = {
        "namespace": namespace,
        "name": name,
        "version": PYPROJECT["version"],
        "readme": "README.md",
        "authors": [each["name"] for each in PYPROJECT["authors"]],
        "description": PYPROJECT["description"],
        "license": [PYPROJECT["license"]],
        "tags": ["infrastructure", "linux", "llm", "training"],
    }
    (folder / "galaxy.yml").write_text(yaml.safe_dump(galaxy, sort_keys=False), encoding="utf-8")
    use_full_names(folder)
    write_ignored(folder)


def write_ignored(folder: Path) -> None:
    """Write what ansible-test is not to report: the licence, which its rules do not know, and two imports without the package."""
    plugins = [
        path
        for kind in ("callback", "inventory", "modules")
        for path in sorted((folder / "plugins" / kind).glob("*.py"))
    ]
    lines = [f"{path.relative_to(folder)} validate-modules:missing-gplv3-license" for path in plugins]
    lines += ["plugins/callback/trainyard.py pylint:unused-import"]
    lines += ["plugins/inventory/ollama.py validate-modules:use-fail-json-not-sys-exit"]
    (folder / "tests/sanity").mkdir(parents=True)
    version = ".".join(ansible.release.__version__.split(".")[:2])
    (folder / f"tests/sanity/ignore-{version}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def use_full_names(folder: Path) -> None:
    """Give plugins, filters, fragments and module_utils the names that they have in a collection."""
    utils = "|".join(path.stem for path in (folder / "plugins/module_utils").glob("*.py"))
    modules = "|".join(path.stem for path in (folder / "plugins/modules").glob("*.py"))
    filters = "|".join(filter_names(folder / "plugins/filter"))
    package = f"ansible_collections.{COLLECTION}.plugins.module_utils"
    fragment = re.compile(r"^(extends_documentation_fragment: )\[(.*)\]$", re.MULTILINE)
    for path in (folder / "plugins").rglob("*.py"):
        text = re.sub(rf"\bansible\.module_utils\.({utils})\b", rf"{package}.\1", path.read_text(encoding="utf-8"))
        text = fragment.sub(
            lambda found: (
                found[1] + "[" + re.sub(r"\btrainyard\b(?=,|\.|$)", f"{COLLECTION}.trainyard", found[2]) + "]"
            ),
            text,
        )
        text = re.sub(rf"\b(M|RV)\(({modules})\b", rf"\1({COLLECTION}.\2", text)
        path.write_text(text, encoding="utf-8")
    for part in ("roles", "playbooks"):
        for path in (folder / part).rglob("*"):
            if path.is_file():
                text = re.sub(
                    rf"(\|\s*|\bmap\(')({filters})\b", rf"\1{COLLECTION}.\2", path.read_text(encoding="utf-8")
                )
                text = re.sub(
                    r"(ansible-playbook (?:-i \S+ )*(?:\{\{ _inventory \}\})?)(?:playbooks/)?(\w+)\.yml",
                    rf"\1{COLLECTION}.\2",
                    text,
                )
                if path.suffix == ".yml":
                    text = re.sub(
                        rf"^(\s+(?:- )?)({modules}):(?= *$| [&*\"])", rf"\1{COLLECTION}.\2:", text, flags=re.MULTILINE
                    )
                path.write_text(text, encoding="utf-8")


def filter_names(folder: Path) -> list[str]:
    """Return the names of the filters that the plugins of a folder define."""
    names: list[str] = []
    for path in sorted(folder.glob("*.py")):
        plugin = runpy.run_path(str(path))["FilterModule"]
        names += plugin().filters()
    return names


def main() -> None:
    """Build the collection."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/collection.py FOLDER")
    with tempfile.TemporaryDirectory() as temporary:
        write_collection(Path(temporary) / "cluster")
        galaxy = str(Path(sys.executable).with_name("ansible-galaxy"))
        build = [galaxy, "collection", "build", "--force", "--output-path", sys.argv[1], f"{temporary}/cluster"]
        subprocess.run(build, check=True)


if __name__ == "__main__":
    main()
