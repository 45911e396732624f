"""`make train` installs what a run needs, with uv, from the package indexes that pip is configured for; torch by its own index."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tables import table

from tools import install
from tools.lock import read_pins
from trainer.common import packages
from trainyard import project_folder
from trainyard.cli.__main__ import main
from trainyard.python_env.resolve import normal_name
from trainyard.python_env.uv_settings import variables_of_pip
from trainyard.remote import package_versions

TOP = Path(__file__).resolve().parents[2]
FOR_TESTS = set(table("install")["for_tests"])


def test_the_settings_of_pip_become_those_of_uv(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://user:secret@mirror.example/simple\nextra-index-url =\n  https://a.example\n"
        "  https://b.example\n[install]\nfind-links = /wheels /more\ntimeout = 7\n[download]\nno-index = true\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "/own", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = variables_of_pip(done.stdout.splitlines())
    assert found.items() >= table("install")["the_settings_of_pip"].items()
    assert "UV_NO_INDEX" not in found, "a setting of another command"
    assert variables_of_pip(["install.find-links='/wheels /more'"]) == {"UV_FIND_LINKS": "/wheels,/more"}


def closure(extras: set[str]) -> set[str]:
    """Return the names of the packages of this environment that the project needs with some extras."""
    project = importlib.metadata.distribution("trainyard-cluster")
    todo = [(line, extra) for line in project.requires or () for extra in sorted(extras)]
    found: set[str] = set()
    for text, extra in todo:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = normal_name(requirement.name)
        if name not in found:
            found.add(name)
            more = importlib.metadata.distribution(name).requires or ()
            todo += [(line, each) for line in more for each in sorted(requirement.extras or {""})]
    return found


def test_make_train_installs_what_a_run_needs() -> None:
    """On a machine without a card. pip, setuptools, wheel, uv and the project itself come on top."""
    try:
        needed = closure({"dashboard", "node"})
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"this environment is not that of make setup: {error}")
    cuda = {name for name in needed if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert {"torch", "transformers", "ansible-core", "starlette"} <= needed
    assert len(needed - cuda) + 5 <= 80 and not needed & FOR_TESTS
    makefile = (TOP / "Makefile").read_text()
    assert "\ntrain: $(READY)\n" in makefile and "\ntest: $(TESTED)\n" in makefile


@pytest.mark.parametrize(
    ("code", "error", "chosen"),
    [
        (0, " + torch==2.13.0+cpu\n", ("cpu", "")),
        (0, " + torch==2.13.0+cu130\n", ("cu130", "")),
        (
            2,
            f"error: Failed to fetch: {install.TORCH_INDEX}/cpu/torch/\n",
            ("", f"{install.TORCH_INDEX} does not answer: torch comes from the configured package index"),
        ),
    ],
)
def test_uv_chooses_torch(code: int, error: str, chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[object] = []

    def trial(*given: object, **_: object) -> subprocess.CompletedProcess[str]:
        words.extend(given)
        return subprocess.CompletedProcess([], code, stderr=error)

    monkeypatch.setattr(install, "uv_install", trial)
    assert install.torch_backend() == chosen
    assert "--torch-backend=auto" in words and "--dry-run" in words


def test_another_error_of_uv_is_shown_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        install, "uv_install", lambda *_, **__: subprocess.CompletedProcess([], 1, stderr="error: no space left\n")
    )
    with pytest.raises(SystemExit, match="no space left"):
        install.torch_backend()


def test_the_lock_has_digests_of_the_build_or_says_that_it_has_none(tmp_path: Path) -> None:
    assert install.constraints("", tmp_path) == (install.LOCK, "")
    assert install.constraints("cpu", tmp_path) == (install.LOCK, "")
    file, told = install.constraints("cu999", tmp_path)
    assert told == "constraints.txt has no digests of torch for cu999: it is not verified"
    lines, held = file.read_text().splitlines(), install.LOCK.read_text().splitlines()
    changed = [(old, new) for old, new in zip(held, lines, strict=True) if old != new]
    assert len(changed) == 1 and changed[0][0].startswith(f"{changed[0][1]} --hash=sha256:")
    assert changed[0][1].startswith("torch==")


# What messages and docs tell a user to install -----------------------------------------------------------------------

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
WITH_VALUE = set(table("install_lines")["with_value"])
END = re.compile(r"\s{2,}|\s#|,? (?:or|in|from|on|which|ansible-galaxy)\b|; |[,;]? *\\$|\\n|\"|\)")
URL = re.compile(r"https?://([^\s\"'`<>)\]}|,/\\]+)(/[^\s\"'`<>)\]}|,\\]*)?")
EXAMPLE = re.compile(
    r"10\.0\.0\.\d+(:\d+)?|127\.0\.0\.1(:.*)?|localhost:6006|git-lfs|ntfy\.example\.org|\[?address\]?(\[?:port)?|node1:11434|[{\[(.].*|",
    re.IGNORECASE,
)
HOSTS = set(table("install_lines")["hosts"])
REPOSITORIES = {"EleutherAI/lm-evaluation-harness", "ollama/ollama", "openai/gpt-2"}


def texts() -> dict[str, str]:
    """Return the files with messages and docs by name."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=TOP, capture_output=True, text=True
    ).stdout.splitlines()
    names = listed or [
        str(path.relative_to(TOP))
        for path in TOP.rglob("*")
        if not {".venv", "__pycache__", ".hypothesis"} & {*path.parts}
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


def test_packages_hold_no_vault_of_the_user() -> None:
    patterns = (TOP / "setup.py").read_text(encoding="utf-8")
    assert "group_vars/all/cluster.yml" in patterns and not re.search(r'(group_vars|inventory)/[^"]*\*', patterns)


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
