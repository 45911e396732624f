"""Fields and launch options of earlier versions: their default is read, and another value is refused with what replaces it."""

from pathlib import Path

import pytest
import yaml
from tables import table

from trainer.common.errors import UserError
from trainer.config import aliases
from trainer.config.flags import parse_flags
from trainer.config.removed_fields import REMOVED_FIELDS, REMOVED_OPTIONS, removed, replacement
from trainer.config.run_spec import FIELDS, RunSpec
from trainer.spec import make_spec, read_spec
from trainyard.cli.command_flags import parse
from trainyard.commands.groups import LAUNCH
from trainyard.run import launch_options


@pytest.fixture
def gone(monkeypatch):
    """Names that no version declares: a text, a number and a list."""
    entries = {"old_text": ("fixed", "set lr"), "old_number": (0.5, "set lr"), "old_list": (("a",), "set lr")}
    monkeypatch.setattr(aliases, "REMOVED", entries)
    monkeypatch.setattr(launch_options, "REMOVED", entries)
    monkeypatch.setattr(LAUNCH, "_removed", entries)


def test_a_file_with_the_defaults_is_the_same_run(gone, tmp_path: Path) -> None:
    (tmp_path / "spec.yml").write_text("lr: 0.001\nold_text: fixed\nold_number: 0.50\nold_list: [a]\n")

    spec = read_spec(tmp_path / "spec.yml", {}, "-e")

    assert spec.named() == make_spec({"lr": 0.001}, "-e").named()


@pytest.mark.parametrize("line", ["old_text: torchft", "old_number: 1", "old_list: [a, b]"])
def test_another_value_in_a_file_names_the_replacement(gone, tmp_path: Path, line: str) -> None:
    (tmp_path / "spec.yml").write_text(line)

    with pytest.raises(UserError, match=rf"{line.split(':')[0]} in .*spec.yml no longer exists: set lr$"):
        read_spec(tmp_path / "spec.yml", {}, "-e")


def test_the_file_of_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """It had the fields `automatic` and `template_date`, which a user's file may not set."""
    decided = make_spec({"lr": 0.001}, "-e").named().model_copy(update={"automatic": ()})
    waiting = make_spec({"lr": 0.001, "precision": "bf16-mixed"}, "-e").named()
    for spec in (decided, waiting):
        values = spec.model_dump(mode="json") | table("removed_fields")["the_file"]
        del values["keep_going"]
        (tmp_path / "spec.yml").write_text(yaml.safe_dump(values))

        assert read_spec(tmp_path / "spec.yml", {}, "-e") == spec
        assert make_spec(yaml.safe_load(spec.to_yaml()), "spec.yml") == spec
        of_queue = spec.model_dump(mode="json") | {"wandb_project": "trainyard"}
        assert RunSpec.model_validate(of_queue) == spec
        with pytest.raises(ValueError, match="wandb_project no longer exists: set WANDB_PROJECT in run_env"):
            RunSpec.model_validate({"wandb_project": "mine"})
    overridden = read_spec(tmp_path / "spec.yml", {"torch_compile": True}, "-e")
    assert overridden.automatic == ("batch_size", "gradient_checkpointing", "quantize", "strategy")
    for name, value in (("automatic", "precision"), ("template_date", "2026-01-31")):
        with pytest.raises(UserError, match=rf"{name} in -e no longer exists: "):
            make_spec({name: value}, "-e")


def test_a_flag_of_the_trainer_names_the_replacement(gone) -> None:
    with pytest.raises(UserError, match=r"old_number in the flags no longer exists: set lr$"):
        make_spec(parse_flags(["--old-number", "0.7"]), "the flags")
    assert make_spec(parse_flags(["--old-number", "0.5"]), "the flags") == make_spec({}, "the flags")


def test_an_option_names_the_replacement(gone) -> None:
    with pytest.raises(UserError, match=r"old_text in -e no longer exists: set lr$"):
        launch_options.make_options({"old_text": "other"}, "-e")
    assert launch_options.make_options({"old_text": "fixed"}) == launch_options.make_options({})
    assert parse("train", [LAUNCH], "", ["--old-text", "other"]).of(LAUNCH) == {"old_text": "other"}


def test_a_variable_of_the_inventory_counts_as_an_option(gone) -> None:
    with pytest.raises(UserError, match="old_text in -e or the inventory no longer exists"):
        launch_options.options_from_variables({"old_text": "other"}, lambda value: value)


def test_names_that_are_declared_are_not_looked_up() -> None:
    assert not aliases.REMOVED.keys() & FIELDS.keys()
    assert not launch_options.REMOVED.keys() & launch_options.OPTIONS.keys()
    assert removed({"lr": (1, "x"), "old": (1, "y")}, FIELDS) == {"old": (1, "y")}


@pytest.mark.parametrize("entries", [REMOVED_FIELDS, REMOVED_OPTIONS])
def test_every_default_is_accepted_as_text_and_as_a_value(entries) -> None:
    for default, instead in entries.values():
        as_text = ",".join(default) if isinstance(default, tuple) else str(default)
        assert not replacement(default, (default, instead)) and not replacement(as_text, (default, instead))
        assert replacement("neither", (default, instead)).endswith(instead)


def test_what_hosts_decided_for_auto_is_read() -> None:
    entry = ("auto", "omit it")
    assert not replacement(False, entry) and replacement(True, entry) == "no longer exists: omit it"
