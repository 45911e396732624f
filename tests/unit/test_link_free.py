"""Paths below folders that code of a rank may write: nothing outside is read, changed or waited for."""

import os
import random
import socket
import stat
import string
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.supervise.link_free import DEPTH, ENTRIES, LinkFreePath, link_free, remove_tree
from trainer.supervise.run_files import LOG_LIMIT, hold_lock, is_locked, read_json, read_log, write_json
from trainyard.remote.exchange import exchange
from trainyard.remote.host_facts import last_rows
from trainyard.remote.host_use import _deployed as deployed_models
from trainyard.remote.trees import files_below, matching, path_below

NAMES = ("r", "state", "file")
ROUNDS = 3000  # of a folder that is exchanged for a link while the helper works

# Everything that is done to a file; each may fail, and touches nothing outside.
FILE_CALLS: dict[str, Callable[[LinkFreePath], object]] = {
    "open": lambda path: path.open_read().read(),
    "read": lambda path: path.read(100),
    "append": lambda path: path.open_append().write(b"evil"),
    "create": lambda path: path.create(),
    "write": lambda path: path.write(b"evil"),
    "touch": lambda path: path.make_file(),
    "unlink": lambda path: path.remove(),
    "chmod": lambda path: path.set_mode(0o777),
    "move away": lambda path: path.move_to(LinkFreePath(path.root, "moved")),
    "move here": lambda path: (
        LinkFreePath(path.root, "from").make_file(),
        LinkFreePath(path.root, "from").move_to(path),
    ),
    "make folder": lambda path: (path / "new").make_folder(),
    "entries": lambda path: path.parent.entries(),
    "remove tree": lambda path: remove_tree(path),
    "lock": lambda path: hold_lock(path).__enter__(),
    "is locked": lambda path: is_locked(path),
    "log": lambda path: read_log(path, 0)["lines"],
    "json": lambda path: read_json(path),
    "write json": lambda path: write_json(path, {}),
    "files": lambda path: list(files_below(path.parent)),
    "matching": lambda path: matching(LinkFreePath(path.root), "*/*/*"),
    "lend": lambda path: exchange({"root": str(path.root), "token": "t", "lend": ["/".join(path.names)]}),
}


def describe(folder: Path) -> list[tuple[str, int, bytes]]:
    """Return names, modes and contents of everything in a folder."""
    return [
        (str(path), path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    ]


def make(folder: Path, outside: Path) -> LinkFreePath:
    """Make a folder, and one outside with the same names and a secret."""
    for top, text in ((folder, "{}"), (outside, '{"secret": 1}')):
        (top / "r/state").mkdir(parents=True)
        (top / "r/state/file").write_text(text)
    return LinkFreePath(folder, *NAMES)


@pytest.mark.parametrize("place", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("name", FILE_CALLS)
def test_no_component_is_a_link(name: str, place: int, tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", tmp_path / "home"
    path = make(root, outside)
    link = root.joinpath(*NAMES[: place + 1])
    link.rename(tmp_path / "old")
    link.symlink_to(outside.joinpath(*NAMES[: place + 1]))
    before = describe(outside)
    try:
        answer = FILE_CALLS[name](path)
    except OSError as error:
        assert error.filename and str(root) in str(error.filename)
        answer = None
    assert describe(outside) == before and "secret" not in repr(answer)
    assert not any("secret" in entry.read_text() for entry in root.glob(".exchange/*/*") if entry.is_file())


@pytest.mark.parametrize("name", sorted(FILE_CALLS))
def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(name: str, tmp_path: Path) -> None:
    """The folder is exchanged, in one step, in between any two system calls."""
    root, outside = tmp_path / "runs", tmp_path / "home"
    path = make(root, outside)
    (root / "link").symlink_to(outside / "r")
    before, ended = describe(outside), threading.Event()

    def swap() -> None:
        names = [root / "r", root / "link", root / "other"]
        while not ended.is_set():
            for first, second in ((0, 2), (1, 0), (0, 1), (2, 0)):
                try:
                    names[first].rename(names[second])
                except OSError:  # the calls have removed it
                    return

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(ROUNDS // len(FILE_CALLS)):
            try:
                answer = FILE_CALLS[name](path)
            except OSError:
                continue
            assert "secret" not in repr(answer)
    finally:
        ended.set()
        thread.join()
    assert describe(outside) == before


def special_files(folder: Path) -> list[str]:
    """Make what is no regular file: a FIFO, a socket, a folder, and as root a device."""
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    (folder / "folder").mkdir()
    if os.geteuid() == 0:
        try:
            os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero: endless
        except PermissionError:
            return ["fifo", "socket", "folder"]
        return ["fifo", "socket", "folder", "device"]
    return ["fifo", "socket", "folder"]


def test_only_regular_files_are_opened_and_nothing_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    for name in special_files(Path()):
        path = LinkFreePath(tmp_path, name)
        for call in ("open", "read", "append", "touch", "lock", "is locked"):
            with pytest.raises(OSError) as error:
                FILE_CALLS[call](path)
            assert error.value.filename == str(path)
        assert read_json(path) is None and read_log(path, 0)["lines"] == [] and not path.is_file()
        with pytest.raises(OSError):
            exchange({"root": str(tmp_path), "token": name, "lend": [name]})
    write_json(LinkFreePath(tmp_path, "fifo"), {"a": 1})
    assert read_json(LinkFreePath(tmp_path, "fifo")) == {"a": 1}, "a file replaces whatever has its name"


def test_sizes_and_numbers_are_bounded(tmp_path: Path) -> None:
    huge = LinkFreePath(tmp_path, "huge")
    huge.make_file()
    os.truncate(tmp_path / "huge", 1 << 40)
    with pytest.raises(OSError, match="larger than 1 KiB"):
        huge.read(1024)
    assert read_json(huge) is None
    assert len(read_log(huge, -1)["lines"]) <= 1
    os.truncate(tmp_path / "huge", 2 * LOG_LIMIT)
    assert read_log(huge, 0)["offset"] == LOG_LIMIT
    nested = LinkFreePath(tmp_path, "nested.json")
    nested.write(b"[" * 60_000)
    assert read_json(nested) is None and last_rows(nested) == [] and deployed_models(tmp_path) == []
    nested.remove()
    for number in range(20):
        (tmp_path / f"n{number:02}").touch()
    assert len(LinkFreePath(tmp_path).entries(5)) == 5 and len(LinkFreePath(tmp_path).entries()) == 21 < ENTRIES
    for number in range(4):
        (tmp_path / f"m{number}/files").mkdir(parents=True)
    assert len(matching(LinkFreePath(tmp_path), "m*/files", 25 + 3)) == 3, "21 files, 4 folders, and 3 in them"
    deep = tmp_path / "/".join("d" * (DEPTH + 2))
    deep.mkdir(parents=True)
    for call in (lambda: list(files_below(LinkFreePath(tmp_path))), lambda: remove_tree(LinkFreePath(tmp_path, "d"))):
        with pytest.raises(OSError, match="nested too deeply"):
            call()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/nowhere/a", "a\0b", "../../x"])
def test_a_name_is_one_component(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the name of a file"):
        LinkFreePath(tmp_path, name)
    with pytest.raises((ValueError, OSError)):
        exchange({"root": str(tmp_path), "token": name, "lend": ["x"]})


def test_any_text_stays_below_the_root_or_is_refused(tmp_path: Path) -> None:
    chosen = random.Random(1)
    parts = ["..", ".", "", "/", "a", "\0", "\udc80", "é", "x" * 300, "link", "~", "%2e%2e"]
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path)
    (tmp_path / "secret").write_text("secret")
    for _ in range(5000):
        text = "/".join(chosen.choices([*parts, *string.printable, "secret"], k=chosen.randint(1, 6)))
        for make_path in (
            lambda t=text: LinkFreePath(tmp_path / "root") / t,
            lambda t=text: path_below(tmp_path / "root", f"{tmp_path}/root/{t}"),
        ):
            try:
                path = make_path()
                assert path.path.is_relative_to(tmp_path / "root") and ".." not in path.path.parts
                path.read(100)
            except (ValueError, OSError):
                continue
            raise AssertionError(text)


def test_links_above_the_root_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk/runs/r").mkdir(parents=True)
    (tmp_path / "data").symlink_to("disk")
    path = LinkFreePath(tmp_path / "data/runs", "r", "state", "node.json")
    path.parent.make_folder()
    path.write(b"{}", 0o600)
    assert (tmp_path / "disk/runs/r/state/node.json").stat().st_mode & 0o777 == 0o600
    assert path.resolved() == LinkFreePath(tmp_path / "disk/runs", *path.names)
    assert link_free(tmp_path / "data/x") == LinkFreePath(tmp_path / "data", "x")


def test_a_link_itself_is_removed_and_replaced(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    for call in ("unlink", "write", "remove tree", "move here"):
        (tmp_path / "link").symlink_to(outside)
        FILE_CALLS[call](LinkFreePath(tmp_path, "link"))
        assert not (tmp_path / "link").is_symlink() and outside.read_text() == "kept"
        (tmp_path / "link").unlink(missing_ok=True)


def test_a_tree_is_removed_without_what_its_links_lead_to(tmp_path: Path) -> None:
    make(tmp_path / "runs", tmp_path / "home")
    (tmp_path / "runs/r/state/link").symlink_to(tmp_path / "home")
    before = describe(tmp_path / "home")
    assert list(files_below(LinkFreePath(tmp_path / "runs", "r"))) == ["state/file", "state/link"]
    remove_tree(LinkFreePath(tmp_path / "runs", "r"))
    assert not (tmp_path / "runs/r").exists() and describe(tmp_path / "home") == before


def test_files_are_exchanged_through_a_private_folder(tmp_path: Path) -> None:
    make(tmp_path / "runs", tmp_path / "home")
    (tmp_path / "runs/r/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "runs/r/checkpoints/step-1/old").touch()
    request = {"root": str(tmp_path / "runs"), "token": "t"}
    exchange(request | {"lend": ["r/state/file"]})
    lent = tmp_path / "runs/.exchange/t"
    assert (lent / "0").read_text() == "{}" and lent.stat().st_mode & 0o777 == 0o700
    (lent / "new").write_text("new")
    step = "r/checkpoints/step-1"
    exchange(request | {"remove": [step], "take": {f"{step}/file": "new"}, "end": True})
    assert [path.name for path in (tmp_path / "runs" / step).iterdir()] == ["file"] and not lent.exists()
    exchange(request | {"aside": ["r/checkpoints/step-*", "r/checkpoints/incomplete"], "end": True})
    assert (tmp_path / "runs/r/checkpoints/incomplete/step-1/file").read_text() == "new"
    assert (tmp_path / "runs/r/state/file").read_text() == "{}"
