"""The wheel in an environment without a checkout: `trainyard init`, then the playbooks and the program in the new folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from run_hosts import TOP, questions

pytestmark = pytest.mark.slow
CLEAN = {name: value for name, value in os.environ.items() if name not in ("ANSIBLE_CONFIG", "PYTHONPATH")}
FINISHED = "run first finished: 2 of 2 steps on 2 ranks"
PROGRAM = "#!{python}\nimport sys\nfrom ansible.cli.{name} import main\nsys.exit(main())\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel without the network, and install them beside the packages of this environment. Returns the programs' folder."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "store", "tests")
    shutil.copytree(TOP, folder / "source", ignore=ignored)
    (folder / "source/inventory/hosts.yml").write_text("cluster: {hosts: {secret: {}}}\n")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=folder / "source", stdout=subprocess.DEVNULL, check=True)
    subprocess.run([*pip, "wheel", *options, *folder.glob("*.tar.gz")], check=True)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith("inventory/hosts.yml") or "__pycache__" in name]
    parts = {"trainer", "trainyard", "trainyard_cluster-0.2.0.data", "trainyard_cluster-0.2.0.dist-info"}
    assert {name.split("/")[0] for name in names} == parts
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], env=CLEAN, check=True)
    site = next((folder / "env/lib").glob("python*")) / "site-packages"
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("playbook", "inventory", "doc"):
        program = folder / f"env/bin/ansible-{name}"
        program.write_text(PROGRAM.format(python=python, name=name))
        program.chmod(0o755)
    return python.parent


def run(folder: Path, installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = CLEAN | {"PATH": f"{installed}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_new_folder_trains_and_discovers_as_a_checkout(installed: Path, tmp_path: Path) -> None:
    outside = run(tmp_path, installed, "trainyard", "status")
    assert outside.returncode == 2 and outside.stderr.endswith(
        "is no project: run trainyard init, or cd to the folder in which you ran it\n"
    )
    if shutil.which("man"):
        manual = run(tmp_path, installed, "man", "-w", "trainyard")
        assert manual.stdout == f"{installed.parent}/share/man/man1/trainyard.1\n"
    made = run(tmp_path, installed, "trainyard", "init", "mine")
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "mine"
    (folder / "group_vars/all/mine.yml").write_text("progress_interval: 0.5\n")

    values = {"model": "tiny", "dataset": str(questions(tmp_path)), "max_steps": 2, "epochs": 20, "run": "first"}
    trained = run(folder, installed, "ansible-playbook", "train.yml", "-e", json.dumps(values))
    assert trained.returncode == 0 and FINISHED in trained.stdout, trained.stdout[-2000:]
    assert (folder / "runs/first/adapter/adapter_config.json").is_file()
    assert (folder / ".trainyard/node2/runs/first").is_dir()
    listed = run(folder, installed, "trainyard", "status", "--json", "--no-hardware", "--all")
    found = [entry["run_dir"] for entry in json.loads(listed.stdout)["runs"]]
    assert found == [f"{folder}/runs/first", f"{folder}/.trainyard/node2/runs/first"], listed.stderr
    stopped = run(folder, installed, "ansible-playbook", "playbooks/stop.yml", "-e", "run=first")
    assert stopped.returncode == 0 and "first" in stopped.stdout, stopped.stdout
    assert run(folder, installed, "ansible-playbook", "site.yml", "--syntax-check").returncode == 0

    text = (folder / "inventory/ollama.yml").read_text().replace("networks: [auto]", "networks: [127.0.0.2/32]")
    (folder / "inventory/ollama.yml").write_text(text)
    graph = run(folder, installed, "ansible-inventory", "-i", "inventory/ollama.yml", "--graph")
    assert graph.returncode == 0 and "|--@discovered:" in graph.stdout, graph.stdout + graph.stderr


def test_the_installed_package_has_what_site_sends_to_hosts(installed: Path, tmp_path: Path) -> None:
    """The trainer's wheel, pip, pinned versions and the pages of the dashboard are those of the checkout."""
    made = {}
    for name, python, environment in (
        ("checkout", Path(sys.executable), {"PYTHONPATH": str(TOP)}),
        ("wheel", installed / "python", {}),
    ):
        code = (
            "import json, pathlib, sys\n"
            "import trainyard.dashboard\n"
            "from trainyard.python_env.bundle import trainer_version, trainer_wheel\n"
            "from trainyard.python_env.resolve import FLAVOURS, read_constraints, requirements\n"
            "from trainyard.project_folder import shared_folder\n"
            "from trainyard.extra_vars import known_variables\n"
            "here, shared = pathlib.Path(sys.argv[1]), shared_folder()\n"
            "trainer_wheel(here)\n"
            "pages = pathlib.Path(trainyard.dashboard.__path__[0])\n"
            "pages = sorted(str(path.relative_to(pages)) for path in pages.rglob('*.*') if path.suffix != '.pyc')\n"
            "print(json.dumps([trainer_version(), pages, len(known_variables(here)),"
            " requirements(shared / 'pyproject.toml', ['nvml'], True),"
            " [read_constraints(shared / name) for name in FLAVOURS.values()]]))\n"
        )
        command = [python, "-c", code, tmp_path / name]
        paths = {"PATH": "/usr/bin:/bin"} | environment
        done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made[name] = (json.loads(done.stdout), sorted(path.name for path in (tmp_path / name).iterdir()))
    assert made["wheel"] == made["checkout"]
