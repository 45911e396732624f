"""Program trees of the queue: what its archive has, and nothing else, runs."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.remote.verified_tree import TreeError, read_regular, unpack


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as file:
        file.writestr("one/__init__.py", "")
        file.writestr("one/main.py", "print('as installed')")
    return tmp_path / "program.zip"


def install(archive: Path, tree: Path) -> bool:
    return unpack(read_regular(archive), tree)


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


@pytest.mark.parametrize("change", [edit, add, take_away, link_file, link_folder, link_another_folder, link_tree])
def test_a_changed_tree_is_unpacked_again(archive: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    tree = tmp_path / "tree"
    assert install(archive, tree) and not install(archive, tree)
    change(tree)
    assert install(archive, tree) and not install(archive, tree)
    assert (tree / "one/main.py").read_text() == "print('as installed')" and not tree.is_symlink()
    assert sorted(path.name for path in tree.rglob("*")) == ["__init__.py", "main.py", "one"]


def test_a_tree_is_read_only(archive: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    install(archive, tree)
    modes = {path: path.stat().st_mode & 0o777 for path in (tree, *tree.rglob("*"))}
    assert all(mode == (0o555 if path.is_dir() else 0o444) for path, mode in modes.items())


def test_an_archive_that_is_a_link_or_has_names_outside_is_refused(archive: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tmp_path / "link.zip").symlink_to(archive)
    with pytest.raises(OSError, match="symbolic links"):
        install(tmp_path / "link.zip", tree)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("../outside.py", "")
    with pytest.raises(TreeError):
        install(archive, tree)
    assert not tree.exists() and not (tmp_path / "outside.py").exists()
