"""The folder that `trainyard init` makes, and the one that a command takes for the project."""

import json
from pathlib import Path

import pytest
import yaml

from trainer.common.errors import UserError
from trainyard import project_folder as module
from trainyard.cli import __main__ as program
from trainyard.new_project import make_project
from trainyard.project_folder import LINK, project_folder, shared_folder

TOP = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def contents(folder: Path) -> dict[str, str]:
    """Return every file and link below a folder; of a link its target."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_every_playbook_of_the_package_is_imported(folder: Path) -> None:
    make_project(folder, check=False)
    for source in [TOP / "site.yml", TOP / "train.yml", *(TOP / "playbooks").glob("*.yml")]:
        path = folder / source.relative_to(TOP)
        (play,) = yaml.safe_load(path.read_text())
        assert (path.parent / play["ansible.builtin.import_playbook"]).resolve() == source
    configuration = (folder / "ansible.cfg").read_text()
    assert configuration.count(f"= {LINK}/") == 8 and "= plugins" not in configuration
    assert (folder / "playbooks/group_vars/all").is_dir()
    assert {name for name in contents(folder) if name.startswith("inventory/")} == {
        f"inventory/{name}.yml" for name in ("hosts.example", "local", "ollama")
    }


def test_a_second_init_changes_nothing_and_keeps_what_the_user_wrote(folder: Path) -> None:
    assert make_project(folder, check=True)["written"] and not contents(folder)
    assert make_project(folder, check=False)["changed"]
    assert not make_project(folder, check=False)["changed"]
    (folder / "ansible.cfg").write_text("[defaults]\nforks = 2\n")
    (folder / "site.yml").unlink()
    (folder / "site.yml").symlink_to("nowhere")
    (folder / "train.yml").unlink()
    before = contents(folder)
    made = make_project(folder, check=False)
    assert (made["written"], made["kept"]) == (["train.yml"], ["ansible.cfg", "site.yml"])
    assert contents(folder).items() > before.items() and any("kept ansible.cfg" in line for line in made["lines"])


def test_a_project_of_another_installation_is_refused_until_init(folder: Path, tmp_path: Path) -> None:
    make_project(folder, check=False)
    assert project_folder() == folder
    (folder / LINK).unlink()
    (folder / LINK).symlink_to(tmp_path / "gone/trainyard/share")
    with pytest.raises(UserError, match=f"gone/trainyard/share, but .* run trainyard init {folder}$"):
        project_folder()
    assert make_project(folder, check=False)["written"] == [LINK]
    assert project_folder() == folder


def test_the_folder_of_the_config_comes_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tmp_path / "other", check=False)
    make_project(folder, check=False)
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "other/ansible.cfg"))
    assert project_folder() == tmp_path / "other"
    assert project_folder(str(TOP / "ansible.cfg")) == TOP
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "own.cfg"))
    assert project_folder() == folder, "another configuration of the user does not hide the project"


def test_a_project_that_all_users_can_change_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(folder, check=False)
    folder.chmod(0o777)
    with pytest.raises(UserError, match="all users can write to it"):
        project_folder()
    monkeypatch.setenv("ANSIBLE_CONFIG", "ansible.cfg")
    assert project_folder() == folder, "Ansible takes it if it is named"


def test_outside_of_a_project_a_command_names_init(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project_folder() == TOP, "the checkout of the package"
    monkeypatch.setattr(module, "_PACKAGE", folder / "site-packages/trainyard")
    (folder / "site-packages/trainyard/share/roles").mkdir(parents=True)
    assert shared_folder() == folder / "site-packages/trainyard/share"
    assert program.main(["status"]) == 2
    assert capsys.readouterr().err == (
        f"error: {folder} is no project: run trainyard init, or cd to the folder in which you ran it\n"
    )


def test_a_checkout_is_no_folder_for_init(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert program.main(["init", str(TOP)]) == 2
    assert "which is a project already" in capsys.readouterr().err
    assert program.main(["init", "new", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(folder / "new") and not contents(folder)
    (folder / "file").touch()
    assert program.main(["init", "file"]) == 2
    assert "cannot write the project" in capsys.readouterr().err
