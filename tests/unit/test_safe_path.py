"""Modules that run as root on a host, against a user who places links in folders of this user."""

import os
import pwd
import subprocess
from pathlib import Path

import pytest
from module_runs import NEEDS_ROOT, home, place, run_module, user

from plugins.module_utils.atomic_file import write_atomic
from plugins.module_utils.safe_path import UnsafePathError, check_path
from plugins.modules import user_folder

__all__ = ["home", "place", "user"]
pytestmark = NEEDS_ROOT
Capture = pytest.CaptureFixture[str]
User = pwd.struct_passwd
SECRET = "root:$6$secret:19000::::::\n"


@pytest.fixture
def root_folder(place: Path) -> Path:
    """A folder of root with a file that only root may read, as /etc with /etc/shadow."""
    made = place / "etc"
    made.mkdir(mode=0o755)
    (made / "shadow").write_text(SECRET)
    (made / "shadow").chmod(0o600)
    return made


def as_user(user: User, *actions: tuple[str, ...]) -> None:
    """Let the user create links and folders: ("link", target, path) or ("folder", path)."""
    with user_folder.acting_as(user):
        for kind, *words in actions:
            if kind == "folder":
                Path(words[0]).mkdir()
            elif kind == "hard":
                os.link(words[0], words[1])
            else:
                Path(words[1]).symlink_to(words[0])


def is_untouched(folder: Path) -> bool:
    """Return whether the folder of root and its file are as they were."""
    file = folder / "shadow"
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in (folder, file)}
    return owners == {(0, 0)} and file.read_text() == SECRET and sorted(folder.iterdir()) == [file]


@pytest.mark.parametrize("kind", ["file link", "folder link", "dangling link", "loop"])
def test_root_writes_no_file_through_a_link_of_a_user(kind: str, home: Path, user: User, root_folder: Path) -> None:
    ssh, keys = home / ".ssh", home / ".ssh/authorized_keys"
    if kind == "folder link":
        as_user(user, ("link", str(root_folder), str(ssh)))
    else:
        target = {"file link": root_folder / "shadow", "dangling link": root_folder / "cron", "loop": keys}[kind]
        as_user(user, ("folder", str(ssh)), ("link", str(target), str(keys)))
    with pytest.raises(OSError, match="could redirect the path while root uses it"):
        write_atomic(keys, "ssh-ed25519 AAAA", 0o600)
    assert is_untouched(root_folder)


@pytest.mark.parametrize("state", ["present", "absent", "pruned"])
@pytest.mark.parametrize("depth", ["data", "data/below"])
def test_folders_of_a_user_are_not_redirected(
    state: str, depth: str, home: Path, user: User, root_folder: Path, capsys: Capture
) -> None:
    (root_folder / "below").mkdir()
    as_user(user, ("link", str(root_folder), str(home / "data")))
    result = run_module(user_folder, capsys, paths=[str(home / depth)], owner="nobody", state=state)
    assert (root_folder / "below").is_dir() and (root_folder / "below").stat().st_uid == 0, result
    (root_folder / "below").rmdir()
    assert is_untouched(root_folder)
    if state == "present":
        assert result["failed"] and "belongs to the user root, not nobody" in result["msg"]


def test_folders_of_a_user_are_created_and_removed(home: Path, user: User, place: Path, capsys: Capture) -> None:
    for path in (home / "data/deep", place / "srv/data"):
        for changed in (True, False):
            result = run_module(user_folder, capsys, paths=[str(path)], owner="nobody", mode="0750")
            assert result["changed"] is changed, result
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (user.pw_uid, 0o750)
        assert path.parent.stat().st_uid == (user.pw_uid if path.parent.parent == home else 0)
        as_user(user, ("folder", str(path / "empty")), ("folder", str(path / "full")), ("folder", str(path / "full/x")))
        for changed in (True, False):
            result = run_module(user_folder, capsys, paths=[str(path)], owner="nobody", state="pruned")
            assert result["changed"] is changed
        assert [entry.name for entry in path.iterdir()] == ["full"]
        for changed in (True, False):
            result = run_module(user_folder, capsys, paths=[str(path)], owner="nobody", state="absent")
            assert result["changed"] is changed
        assert not path.exists()


def test_folders_that_are_nested_deeply_are_removed(home: Path, user: User, capsys: Capture) -> None:
    nest = "i=0; while [ $i -lt 1500 ]; do mkdir d && cd -P ./d || exit; i=$((i+1)); done; ln -s / link"
    subprocess.run(["/bin/sh", "-c", nest], cwd=home, user=user.pw_uid, check=True)
    result = run_module(user_folder, capsys, paths=[str(home / "d")], owner="nobody", state="absent")
    assert result.get("changed") and not (home / "d").exists(), result


def test_folders_that_a_run_has_closed_are_removed(home: Path, user: User, capsys: Capture) -> None:
    """By their user, without the rights of root, where root could be redirected."""
    close = "mkdir -p d/a/b/c && touch d/a/b/c/file && chmod 0 d/a/b/c d/a/b d/a"
    subprocess.run(["/bin/sh", "-c", close], cwd=home, user=user.pw_uid, check=True)
    result = run_module(user_folder, capsys, paths=[str(home / "d")], owner="nobody", state="absent")
    assert result.get("changed") and not (home / "d").exists(), result


def test_a_folder_of_root_becomes_the_users(place: Path, user: User, capsys: Capture) -> None:
    (place / "srv").mkdir()
    (place / "link").symlink_to("srv")  # an administrator's link
    for changed in (True, False):
        result = run_module(user_folder, capsys, paths=[str(place / "link")], owner="nobody")
        assert result["changed"] is changed
    assert (place / "srv").stat().st_uid == user.pw_uid


def test_folders_that_everybody_may_write_are_unsafe_without_the_sticky_bit(place: Path, user: User) -> None:
    folder = place / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    check_path(folder / "file")
    as_user(user, ("link", "/etc", str(folder / "link")))  # as in /tmp
    for use in (check_path, lambda path: write_atomic(path, "", 0o644)):
        with pytest.raises(OSError, match="belongs to the user nobody"):
            use(folder / "link/file")
    folder.chmod(0o777)
    with pytest.raises(UnsafePathError, match="writable for every user"):
        check_path(folder / "file")
    check_path(Path("/etc/../etc/hosts"))
    check_path(place / "missing/file")
