"""`make train` installs what a run needs, with uv, from the package indexes that pip is configured for; torch by its own index."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import install
from trainyard.python_env.resolve import normal_name
from trainyard.python_env.uv_settings import variables_of_pip

TOP = Path(__file__).resolve().parents[2]
FOR_TESTS = {
    "molecule",
    "mypy",
    "trl",
    "selenium",
    "deepspeed",
    "pytest",
    "mkdocs",
    "ansible-lint",
    "hypothesis",
}


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
    assert (
        found.items()
        >= {
            "UV_DEFAULT_INDEX": "https://user:secret@mirror.example/simple",
            "UV_INDEX": "https://a.example https://b.example",
            "UV_FIND_LINKS": "/own",
            "UV_HTTP_TIMEOUT": "7",
        }.items()
    )
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
def test_uv_chooses_the_build_of_torch(
    code: int, error: str, chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
