"""Configuration files of other tools become run specs, and no name of theirs is lost."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import table

from trainer.common.errors import UserError
from trainer.config import parse_mapping
from trainer.spec import check_given, make_spec
from trainyard.cli import __main__ as program
from trainyard.import_file.import_options import ImportOptions
from trainyard.import_file.spec_text import import_files, tool_of
from trainyard.import_file.tables import NAMES, tool_named

BASE = table("import_file")["base"]
FACTORY = table("import_file")["factory"]
TRL = table("import_file")["trl"]
MINIMAL = table("import_file")["minimal"] | {"trl": TRL, "axolotl": BASE, "llama-factory": FACTORY}


def written(folder: Path, *files: dict[str, Any]) -> list[Path]:
    """Write files in JSON, which is YAML, too."""
    paths = []
    for number, names in enumerate(files):
        paths.append(folder / f"c{number}.json")
        paths[-1].write_text(json.dumps(names), encoding="utf-8")
    return paths


def imported(folder: Path, *files: dict[str, Any], **how: Any) -> tuple[dict[str, Any], str]:
    """Return the fields that a spec sets, and its text."""
    text = "\n".join(import_files(written(folder, *files), **how).lines)
    values = parse_mapping(text, "the spec")
    check_given(make_spec(values, "the spec"), values, "the spec")
    return values, text


# Tables ------------------------------------------------------------------------------------------------------------------


def cases(kind: str) -> list[tuple[dict[str, Any], dict[str, Any], Any]]:
    """Return the smallest file of a tool, the names to add, and what they become."""
    return [(MINIMAL.get(tool, {}), names, found) for tool, names, found in table("imported_names")[kind]]


@pytest.mark.parametrize(
    ("base", "names", "fields"), cases("fields"), ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_names_are_fields(base: dict[str, Any], names: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    values, _ = imported(tmp_path, base | names)
    assert {name: values.get(name) for name in fields} == fields


@pytest.mark.parametrize(("base", "names", "comment"), cases("comments"))
def test_what_sets_no_field_is_a_comment(
    base: dict[str, Any], names: dict[str, Any], comment: str, tmp_path: Path
) -> None:
    text = imported(tmp_path, base | names)[1]
    assert comment in text or comment in text.replace("\n#     ", " "), text


@pytest.mark.parametrize(("base", "names", "said"), cases("refused"))
def test_what_is_not_imported_is_a_line(base: dict[str, Any], names: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        import_files(written(tmp_path, base | names))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_several_files_describe_one_run(tmp_path: Path) -> None:
    accelerate = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 2}}
    deepspeed = {"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 0.5}
    values, text = imported(tmp_path, TRL | {"gradient_accumulation_steps": 2}, accelerate, deepspeed)
    assert values["gradient_accumulation"] == 8 and "of each of 4 ranks" in text
    assert values["max_grad_norm"] == 0.5
    assert values["deepspeed_config"] == {"zero_optimization": {"overlap_comm": True}}
    assert imported(tmp_path, TRL, ranks=3)[0]["gradient_accumulation"] == 3
    assert imported(tmp_path, TRL | {"deepspeed": deepspeed}, deepspeed)[0]["max_grad_norm"] == 0.5
    with pytest.raises(UserError, match="the options of DeepSpeed are given twice: keep one file"):
        imported(tmp_path, TRL | {"deepspeed": {"gradient_clipping": 1.0}}, deepspeed)
    with pytest.raises(UserError, match="max_grad_norm"):
        imported(tmp_path, TRL | {"max_grad_norm": 2.0}, deepspeed)


def test_files_that_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = table("import_file")["info"]
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    folder = tmp_path / "examples"
    folder.mkdir()
    values, text = imported(folder, FACTORY | {"dataset": "mine,theirs", "deepspeed": "ds.json"})
    assert values["dataset"] == [
        {"path": str(tmp_path / "data/a.json"), "columns": {"instruction": "q", "output": "a"}},
        {"path": "org/x", "split": "test"},
    ]
    assert values["deepspeed_stage"] == 1 and "dataset theirs.formatting: sharegpt" in text
    values, _ = imported(folder, FACTORY | {"dataset": "pairs", "stage": "dpo"})
    assert values["method"] == "dpo" and values["dataset"] == [
        {"path": str(tmp_path / "data/p.json"), "columns": {"instruction": "q", "chosen": "yes"}}
    ]


# Nothing is lost ---------------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from(["lora", "auto", "1e-4", "q_proj,v_proj", "steps", "none", "4", "bf16"]),
    st.lists(st.sampled_from(["a", "q_proj", 1, None]), max_size=3),
    st.dictionaries(st.sampled_from(["name", "path", "enabled", "stage", "x\ny"]), st.sampled_from([1, True, "a", None]), max_size=3),
)  # fmt: skip


def check_nothing_is_lost(folder: Path, names: dict[str, Any], tool: str) -> None:
    """Check that every name is in the spec, or that an error has one line."""
    try:
        text = "\n".join(import_files(written(folder, names), tool=tool).lines)
    except UserError as error:
        assert "\n" not in str(error)
        return
    make_spec(parse_mapping(text, "the spec"), "the spec")
    lost = [name for name in names if not re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", text)]
    assert not lost, (lost, text)


@pytest.mark.parametrize("tool", NAMES)
@pytest.mark.parametrize("value", [True, "word", {"name": "a", "b": {"c": 1}}], ids=["switch", "word", "mapping"])
def test_every_name_of_a_tool_is_accounted_for(tool: str, value: Any, tmp_path: Path) -> None:
    base = tool_named("transformers").rows if tool in ("trl", "axolotl", "llama-factory") else {}
    own = {name: row for name, row in tool_named(tool).rows.items() if base.get(name) != row}
    together = [name for name, row in own.items() if row.kind in ("unused", "impossible") and name not in MINIMAL[tool]]
    check_nothing_is_lost(tmp_path, MINIMAL[tool] | dict.fromkeys(together, value), tool)
    for name, row in own.items():
        if name not in together:
            check_nothing_is_lost(tmp_path, MINIMAL[tool] | {name: value}, tool)
        if row.kind == "section":
            check_nothing_is_lost(tmp_path, MINIMAL[tool] | {name: dict.fromkeys(row.rows, value)}, tool)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300])
def test_a_number_that_is_no_integer_is_not_lost(value: float, tmp_path: Path) -> None:
    check_nothing_is_lost(tmp_path, MINIMAL["deepspeed"] | {"steps_per_print": value}, "deepspeed")


@pytest.mark.parametrize("tool", NAMES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_name_of_a_file_is_lost(tool: str, tmp_path: Path, data: st.DataObject) -> None:
    known = st.sampled_from(sorted(tool_named(tool).rows))
    unknown = st.text(st.characters(categories=["Ll", "Nd"]), min_size=1, max_size=8)
    check_nothing_is_lost(tmp_path, data.draw(st.dictionaries(known | unknown, VALUES, max_size=8)), tool)


def test_text_of_a_file_stays_in_comments(tmp_path: Path) -> None:
    names = BASE | table("import_file")["text_of_a_file"]
    values, text = imported(tmp_path, names)
    assert values["model"] == "org/m" and "lr" not in values and values["seed"] == 42
    assert all(line.isprintable() for line in text.splitlines())
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert "tf32" in imported(tmp_path, BASE | {"tf32": deep, "weight_decay": 10**4200, "debug": 10**4200})[1]


def test_the_tool_of_a_file() -> None:
    assert {name: tool_of(names) for name, names in MINIMAL.items()} == {name: tool_named(name) for name in NAMES}


def test_every_tool_is_an_option() -> None:
    assert list(get_args(ImportOptions.model_fields["tool"].annotation)) == ["auto", *NAMES]


def test_other_commands_do_not_read_the_tables() -> None:
    program = "import sys, trainyard.commands.table; print([name for name in sys.modules if 'import_file' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['trainyard.import_file',", "'trainyard.import_file.import_options']"]


# The command -------------------------------------------------------------------------------------------------------------


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = written(tmp_path, BASE | {"test_value": 7})
    assert program.main(["import", str(file)]) == 0
    printed = capsys.readouterr().out
    output = tmp_path / "run.yml"
    assert program.main(["import", str(file), "--output", str(output), "--check"]) == 0 and not output.exists()
    assert program.main(["import", str(file), "--output", str(output)]) == 0
    assert "unknown name: test_value: 7" in capsys.readouterr().out and output.read_text(encoding="utf-8") == printed
    assert yaml.safe_load(printed)["seq_length"] == 512
    assert program.main(["import", str(file), "--output", str(output)]) == 2
    assert program.main(["import", str(file), "-i", "hosts.yml"]) == 2
    assert program.main(["import"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.split(": ")[1] for error in errors] == ["output", "import", "import"] and "File exists" in errors[0]


def test_trl_trains_the_completion_alone_of_prompt_and_completion(tmp_path: Path) -> None:
    for record, expected in (({"prompt": "a", "completion": "b"}, "answer"), ({"text": "a"}, "all")):
        data = tmp_path / "d.jsonl"
        data.write_text(json.dumps(record))
        values, _ = imported(tmp_path, {"model_name_or_path": "m", "dataset_name": str(data), "use_peft": True})
        assert values["train_on"] == expected
    _, text = imported(tmp_path, {"model_name_or_path": "m", "dataset_name": "org/name", "use_peft": True})
    assert "set train_on=answer for such data" in " ".join(text.replace("#", "").split())
