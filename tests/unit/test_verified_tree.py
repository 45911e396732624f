"""Program trees of services: what was installed, and nothing else, runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.remote import verified_tree

PROGRAM = [sys.executable, "-I", verified_tree.__file__]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as file:
        file.writestr("one/__init__.py", "")
        file.writestr("one/main.py", "print('as installed')")
    return tmp_path / "program.zip"


def install(archive: Path, tree: Path) -> bool:
    return verified_tree.install(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), tree)


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    words = [*PROGRAM, "run", str(tree), "--", sys.executable, "-B", str(tree / "one/main.py")]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def edit(tree: Path) -> None:
    (tree / "one/main.py").chmod(0o644)
    (tree / "one/main.py").write_text("print('edited')")


def add(tree: Path) -> None:
    (tree / "one").chmod(0o755)
    (tree / "one/more.py").touch()


def take_away(tree: Path) -> None:
    (tree / "one").chmod(0o755)
    (tree / "one/__init__.py").unlink()


def link_file(tree: Path) -> None:
    (tree / "one").chmod(0o755)
    (tree / "one/main.py").rename(tree.parent / "same")
    (tree / "one/main.py").symlink_to(tree.parent / "same")


def link_folder(tree: Path) -> None:
    for folder in (tree, tree / "one"):
        folder.chmod(0o755)
    (tree / "one").rename(tree.parent / "same")
    (tree / "one").symlink_to(tree.parent / "same")


def link_another_folder(tree: Path) -> None:
    (tree / "one").chmod(0o755)
    (tree / "one/more").symlink_to(tree.parent)


def link_tree(tree: Path) -> None:
    tree.rename(tree.parent / "same")
    tree.symlink_to(tree.parent / "same")


def lose_the_list(tree: Path) -> None:
    tree.with_name("tree.sha256").unlink()


@pytest.mark.parametrize(
    "change", [edit, add, take_away, link_file, link_folder, link_another_folder, link_tree, lose_the_list]
)
def test_a_changed_tree_does_not_run_until_it_is_installed_again(
    archive: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    tree = tmp_path / "tree"
    assert install(archive, tree) and not install(archive, tree)
    assert run(tree).stdout == "as installed\n"
    change(tree)
    refused = run(tree)
    assert (refused.returncode, refused.stdout) == (verified_tree.REFUSED, "")
    assert refused.stderr.startswith("error: ") and len(refused.stderr.splitlines()) == 1
    assert str(tmp_path) in refused.stderr and refused.stderr.endswith(": run site.yml\n")
    assert install(archive, tree) and run(tree).stdout == "as installed\n"
    assert sorted(path.name for path in tree.rglob("*")) == ["__init__.py", "main.py", "one"]


def test_what_is_installed_is_read_only_and_listed_as_sha256sum_does(archive: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    install(archive, tree)
    modes = {path: path.stat().st_mode & 0o777 for path in (tree, *tree.rglob("*"))}
    assert all(mode == (0o555 if path.is_dir() else 0o444) for path, mode in modes.items())
    words = ["sha256sum", "--check", "--strict", "--quiet", "../tree.sha256"]
    assert subprocess.run(words, cwd=tree, check=False).returncode == 0


def test_an_archive_with_another_digest_or_with_names_outside_is_refused(archive: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    with pytest.raises(verified_tree.TreeError, match="was changed while it was installed"):
        verified_tree.install(archive, "0" * 64, tree)
    (tmp_path / "link.zip").symlink_to(archive)
    with pytest.raises(OSError, match="symbolic links"):
        install(tmp_path / "link.zip", tree)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("../outside.py", "")
    with pytest.raises(verified_tree.TreeError):
        install(archive, tree)
    assert not tree.exists() and not (tmp_path / "outside.py").exists()
