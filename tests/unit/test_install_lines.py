"""What messages and docs tell a user to install, and every URL in them: ours is on no index and no site yet, and the names are others'."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from tools.lock import read_pins
from trainer.common import packages
from trainyard import project_folder
from trainyard.cli.__main__ import main
from trainyard.remote import package_versions

TOP = Path(__file__).resolve().parents[2]
NOT_OURS = re.compile(
    r"^(tests|benchmarks|trainyard/dashboard/static|trainyard/datasets|docs/pictures)/|^constraints|\.(png|svg)$|^LICENSE"
)
INSTALL = re.compile(
    r"\b(?:pip3? (?:install|download)|pipx (?:install|run)|uv tool install|uv pip install|uv add|uvx|collection install)\b[^\n`]*"
)
WHEEL = r"(?:dist/)?trainyard_cluster-(?:0\.2\.0|\{version\})-py3-none-any\.whl"
# What such a command may name: a checkout, a file that `make dist` writes, a package of the lock, and what a message fills in.
TARGETS = re.compile(
    rf"\.(?:\[[a-z,]+\])?|{WHEEL}|trainyard-cluster-(?:0\.2\.0|\{{version\}})\.tar\.gz|ansible-core|torch==[\d.]+|uv|trl|\{{package\}}.*"
)
WITH_VALUE = {
    *(
        "-c",
        "-d",
        "-r",
        "--constraint",
        "--find-links",
        "--index-url",
        "--platform",
        "--python-version",
        "--requirement",
    ),
    *("--python", "--spec", "--target", "--with-executables-from"),
}
END = re.compile(r"\s{2,}|\s#|,? (?:or|in|from|on|which|ansible-galaxy)\b|; |[,;]? *\\$|\\n|\"|\)")
URL = re.compile(r"https?://([^\s\"'`<>)\]}|,/\\]+)(/[^\s\"'`<>)\]}|,\\]*)?")
EXAMPLE = re.compile(
    r"10\.0\.0\.\d+(:\d+)?|127\.0\.0\.1(:.*)?|localhost:6006|ntfy\.example\.org|\[?address\]?(\[?:port)?|node1:11434|[{\[(.].*|",
    re.IGNORECASE,
)
HOSTS = {
    *(
        "arxiv.org",
        "conda.anaconda.org",
        "deepspeed.readthedocs.io",
        "docs.kernel.org",
        "docs.pytorch.org",
        "docs.vllm.ai",
    ),
    *(
        "doi.org",
        "download.pytorch.org",
        "galaxy.ansible.com",
        "huggingface.co",
        "json-schema.org",
        "keepachangelog.com",
    ),
    *("man7.org", "meta-pytorch.org", "no-color.org", "ollama.com", "pypi.org", "semver.org", "slurm.schedmd.com"),
    *("www.deepspeed.ai", "www.freedesktop.org", "www.w3.org"),
}
REPOSITORIES = {"EleutherAI/lm-evaluation-harness", "ollama/ollama", "openai/gpt-2"}


def texts() -> dict[str, str]:
    """Return the files with messages and docs by name."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=TOP, capture_output=True, text=True
    ).stdout.splitlines()
    names = listed or [
        str(path.relative_to(TOP)) for path in TOP.rglob("*") if not {".venv", "__pycache__"} & {*path.parts}
    ]
    files = [name for name in names if not NOT_OURS.search(name) and (TOP / name).is_file()]
    return {name: (TOP / name).read_text(encoding="utf-8", errors="ignore") for name in files}


def targets(command: str) -> list[str]:
    """Return what a command installs, as far as the line says."""
    words = END.split(re.sub(r"^(?:\S+ )*?(?:install|download|run|add|uvx)\b", "", command, count=1))[0].split()
    found, skip = [], False
    for word in words:
        if not skip and not word.startswith("-"):
            found += [target for target in [word.strip("'\":,")] if target]
        skip = word in WITH_VALUE
    return found


def test_install_commands_name_nothing_of_others() -> None:
    named = [
        (name, target, command[0])
        for name, text in texts().items()
        for command in INSTALL.finditer(text)
        for target in targets(command[0])
    ]
    assert len(named) > 12
    assert not [each for each in named if not TARGETS.fullmatch(each[1])]


def test_no_extra_of_the_project_is_named_without_a_file() -> None:
    """`trainyard[wandb]` is an extra of another author's package."""
    assert not [name for name, text in texts().items() if re.search(r"(?<![\w/.-])trainyard(-cluster)?\[[a-z]", text)]


def test_every_url_is_known() -> None:
    unknown = []
    for name, text in texts().items():
        for host, path in URL.findall(text):
            repository = "/".join(path.strip("/").split("/")[:2])
            if host == "github.com" and repository in REPOSITORIES:
                continue
            if host not in HOSTS and not EXAMPLE.fullmatch(host.rstrip(";.:")):
                unknown.append((name, host, path))
    assert not unknown


def test_the_versions_in_messages_are_those_of_the_lock() -> None:
    pins = read_pins("constraints.txt")
    assert {name: f"=={pins[name]}" for name in packages.PINNED} == packages.PINNED
    command = project_folder.pip_install(["torch", "no-such-package"])
    assert command == f"{sys.executable} -m pip install torch=={pins['torch']} no-such-package"
    assert packages.how_to_install("wandb", "wandb") == (
        f"add wandb to python_extras and run site.yml, or {sys.executable} -m pip install wandb=={pins['wandb']}"
    )
    assert packages.how_to_install("datasets").startswith("run site.yml, or ")


@pytest.mark.parametrize(("files", "found"), table("install_lines")["a_package_of_the_same_name_is_told"])
def test_a_package_of_the_same_name_is_told(
    files: list[str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "trainyard-0.0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trainyard\nVersion: 0.0.3\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert project_folder.foreign_package() == found
    main(["help"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == bool(found)
    assert all("trainyard 0.0.3 of the package index, which is another project" in line for line in lines)


def test_a_host_tells_of_a_package_of_the_same_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    site = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
    (site / "trainyard-0.0.3.dist-info").mkdir()
    (site / "trainyard-0.0.3.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: trainyard\nVersion: 0.0.3\n")
    (site / "trainyard-0.0.3.dist-info/RECORD").write_text("trainyard/__init__.py,,\n")
    found = package_versions.package_versions(str(tmp_path / "env/bin/python"))
    assert found.pop("python") and found == {package_versions.FOREIGN: "0.0.3"}
