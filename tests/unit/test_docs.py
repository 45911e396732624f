"""The documentation: links resolve, what it names exists, and generated pages are current."""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import table

from tools.release_notes import release_notes
from trainyard.commands.command_options import LogsOptions
from trainyard.commands.table import COMMANDS
from trainyard.dashboard.dashboard_options import DashboardOptions
from trainyard.deploy.deploy_options import DeployOptions
from trainyard.evaluate.side_by_side import OPTIONS as EVALUATE_OPTIONS
from trainyard.ollama.distill_options import OPTIONS as DISTILL_OPTIONS
from trainyard.queue.request import OPTIONS as QUEUE_OPTIONS
from trainyard.workflows.merge_runs import OPTIONS as MERGE_OPTIONS

TOP = Path(__file__).resolve().parents[2]
PAGES = sorted([*TOP.glob("*.md"), *(TOP / "docs").glob("**/*.md"), *(TOP / "roles").glob("*/*.md")])
# A changelog names what has been removed, too.
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
# Variables that playbooks read from -e, in addition to the run spec, the launch options and the variables of roles.
PLAYBOOK_VARIABLES = {"all", "watch", "interval", "keep", "force", "grace", "host", "json", "run"}
PLAYBOOK_VARIABLES |= {*DISTILL_OPTIONS, *MERGE_OPTIONS, *EVALUATE_OPTIONS, *QUEUE_OPTIONS, "do", "file"}
PLAYBOOK_VARIABLES |= {*DashboardOptions.model_fields, *LogsOptions.model_fields, *DeployOptions.model_fields}
PLAYBOOK_VARIABLES |= {"deepspeed"}  # the path of a file that becomes a field
# What an error message in the documentation is about.
UNKNOWN_ON_PURPOSE = {"lerning_rate"}

# Words of the project's former private language.
PRIVATE_WORDS = re.compile(
    r"\b(men(d|ds|ded)|somebody|alike|comes? back|is away|goes? on|cannot be had|so many|crew|landing|judgement"
    r"|the others|meetings?|keepers|be told|puts? the fuse out|lets? go of)\b",
    re.IGNORECASE,
)


def name_of(page: Path) -> str:
    return str(page.relative_to(TOP))


def all_text(pages: list[Path] = CURRENT) -> str:
    return "\n".join(page.read_text() for page in pages)


def slug(heading: str) -> str:
    """Return the anchor that both GitHub and mkdocs give to a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(page: Path) -> set[str]:
    prose = FENCE.sub("", page.read_text())
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("write_docs", TOP / "tools" / "write_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_paths_exist(page: Path) -> None:
    """Every path of the repository that a page names exists."""
    named = re.findall(
        r"(?<![\w/.~-])((?:playbooks|plugins|roles|trainer|trainyard|tests|tools|benchmarks|inventory|group_vars|molecule|docs)"
        r"/[A-Za-z0-9_./-]*[A-Za-z0-9_/])",
        page.read_text(),
    )
    # Files that a user writes.
    own = {"inventory/hosts.yml", "inventory/lab.yml"}
    missing = sorted({path for path in named if path not in own and not (TOP / path).exists()})
    assert not [path for path in missing if "NAME" not in path]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_english(page: Path) -> None:
    """Prose uses the vocabulary of the field, one heading of level 1, and no private words."""
    prose = FENCE.sub("", page.read_text())
    assert not sorted({match[0] for match in PRIVATE_WORDS.finditer(prose)})
    if page.name != "NOTES.md":
        assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1


def test_make_targets_exist() -> None:
    makefiles = [TOP / "Makefile", *TOP.glob("*/*.mk")]
    targets = {
        target
        for makefile in makefiles
        for line in re.findall(r"^([a-z][a-z -]*):(?!=)", makefile.read_text(), re.MULTILINE)
        for target in line.split()
    }
    named = set(re.findall(r"(?:^|`|sudo |# )make ([a-z][a-z-]*[a-z])", all_text(), re.MULTILINE))
    assert {"train", "test", "lab"} <= named
    assert not named - targets


def test_benchmarks_exist() -> None:
    named = set(re.findall(r"make bench NAME=([a-z_]+)", all_text()))
    assert named
    assert not {name for name in named if not (TOP / "benchmarks" / f"{name}.py").exists()}


def known_names() -> set[str]:
    """Return every name that ``-e`` accepts."""
    from trainer.config import FIELDS

    names = set(FIELDS) | PLAYBOOK_VARIABLES | UNKNOWN_ON_PURPOSE
    if importlib.util.find_spec("trainyard.run.launch_options"):
        from trainyard.run import launch_options as options

        names |= set(options.names())
    for path in (TOP / "group_vars" / "all").glob("*.yml"):
        names |= set(yaml.safe_load(path.read_text()) or {})
    return names | role_variables()


def role_variables() -> set[str]:
    found = set()
    for path in (TOP / "roles").glob("*/meta/argument_specs.yml"):
        found |= set(yaml.safe_load(path.read_text())["argument_specs"]["main"].get("options") or {})
    return found


def test_extra_variables_exist() -> None:
    text = all_text()
    named = set(re.findall(r"-e ([a-z_]+)=", text)) | set(re.findall(r"-e '\{\"([a-z_]+)\":", text))
    assert {"model", "run", "host"} <= named
    assert not named - known_names()


def test_command_line_flags_of_the_trainer_exist() -> None:
    """``python -m trainer ... --flag`` in a code block names a field of the run spec or a flag of the program."""
    from trainer.config import is_known
    from trainer.tools.tool_configs import SLURM_OPTIONS

    program = (TOP / "trainer" / "__main__.py").read_text()
    flags = set()
    for line in re.findall(r"^.*-m trainer .*$", all_text(), re.MULTILINE):
        words = line.partition("-m trainer")[2].partition("   #")[0]
        flags |= set(re.findall(r"(--[a-z][a-z_.-]*)", words.split("`")[0]))
    assert flags
    flags -= {f"--{name}" for name in SLURM_OPTIONS}
    names = {flag: flag[2:].replace("-", "_") for flag in flags}
    assert not {
        flag
        for flag, name in names.items()
        if not is_known(name) and f'"{flag}"' not in program and f'"--{name}"' not in program
    }


def test_assignments_in_code_spans_exist() -> None:
    """An inline ``name=value`` of a strategy guide is a field of the run spec with a value that it accepts."""
    from trainer.config import FIELDS, RunSpec

    named = set(re.findall(r"`([a-z_]+)=([^`\s]*)`", all_text([TOP / "docs/strategies.md"])))
    assert named
    for field, value in sorted(named):
        if field in FIELDS and value:
            fields = {"quantize": {"lora_r": 8}, "deepspeed_stage": {"strategy": "deepspeed"}}.get(field, {})
            RunSpec.model_validate({**fields, field: value})
        else:
            assert field in known_names(), field


def test_preflight_checks_are_those_of_the_code() -> None:
    page = (TOP / "docs" / "troubleshooting.md").read_text()
    table = page.partition("| check | finds |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`([a-z-]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    source = "\n".join(path.read_text() for path in (TOP / "trainyard" / "preflight").glob("*.py"))
    missing = {check for check in documented if f'"{check}"' not in source}
    assert documented and not missing
    undocumented = set(re.findall(r'(?:Finding|failure|warning|note)\(\s*"([a-z-]+)"', source)) - documented
    assert not undocumented


def test_roles_are_documented() -> None:
    roles = {path.parents[1].name for path in (TOP / "roles").glob("*/meta/argument_specs.yml")}
    assert roles <= anchors(TOP / "docs" / "roles.md")


def test_strategies_are_documented() -> None:
    table = (TOP / "docs" / "strategies.md").read_text().partition("<!-- generated")[2].partition("<!-- end")[0]
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE))
    from trainer.strategy import STRATEGIES

    assert documented == set(STRATEGIES)


def test_generated_pages_are_current() -> None:
    pages = generator().pages().items()
    outdated = [name_of(path) for path, text in pages if not path.exists() or path.read_text() != text]
    assert not outdated, "run make docs"


def test_generated_page_that_differs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = generator()
    page = tmp_path / "page.md"
    page.write_text("old\n")
    monkeypatch.setattr(module, "TOP", tmp_path)
    monkeypatch.setattr(module, "pages", lambda: {page: "new\n"})
    monkeypatch.setattr(sys, "argv", ["write_docs.py", "--check"])
    assert module.main() == 1
    assert capsys.readouterr().err == "error: page.md is not current: run make docs\n"
    monkeypatch.setattr(sys, "argv", ["write_docs.py"])
    assert module.main() == 0
    assert page.read_text() == "new\n"


def test_the_man_page_shows_every_command_and_flag_as_it_is_typed() -> None:
    if not shutil.which("groff"):
        pytest.skip("needs groff (Debian package groff-base)")
    command = ["groff", "-man", "-Tutf8", "-ww", "-P-c", "-P-bou", TOP / "docs/trainyard.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    shown = set(re.split(r"[\s,]+", done.stdout))
    fields = {name for command in COMMANDS.values() for group in command.all_groups for name in group.fields}
    assert {f"--{name.replace('_', '-')}" for name in fields} | set(" ".join(COMMANDS).split()) <= shown
    roff = generator().roff
    assert roff("'tiny' or `.x`: a-b\\n,c") == r"\(aqtiny\(aq or \fB.x\fR: a\-b\en,\:c"
    assert roff(".TP") == r"\&.TP"


def test_pictures_are_current() -> None:
    for source in (TOP / "docs/pictures").glob("*.dot"):
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        assert digest in source.with_suffix(".svg").read_text(encoding="utf-8"), f"{source}: run `make pictures`"


def test_targets_of_the_makefile_run_tools_that_exist() -> None:
    text = "\n".join(file.read_text() for file in (TOP / "Makefile", TOP / ".ci" / "run"))
    named = re.findall(r"(?<!/)\btools/[\w.-]+", text)
    assert len(named) > 5
    assert not [name for name in named if not (TOP / name).is_file()]


def test_changes_are_one_line_each() -> None:
    unreleased = (TOP / "CHANGELOG.md").read_text().partition("## [Unreleased]\n")[2].partition("\n## [")[0]
    lines = [line for line in unreleased.splitlines() if line]
    assert not [line for line in lines if not line.startswith(("- ", "### ")) or len(line) > 160]


def test_metadata_is_consistent() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert f"## [{project['version']}]" in (TOP / "CHANGELOG.md").read_text()
    assert (TOP / "LICENSE").read_text().lstrip().startswith("Apache License")
    for package in ("trainer", "trainyard"):
        assert (TOP / package / "py.typed").exists()


# A release -----------------------------------------------------------------------------------------------------------

PYPROJECT = '[project]\nversion = "1.2.0"\n'
CHANGELOG = table("release")["changelog"]


def test_the_notes_are_the_section_of_the_version() -> None:
    assert release_notes("v1.2.0", PYPROJECT, CHANGELOG) == "### Added\n\n- this\n"
    assert release_notes("v1.1.0", PYPROJECT.replace("1.2", "1.1"), CHANGELOG) == "- before\n"


@pytest.mark.parametrize(
    ("tag", "pyproject", "changelog", "error"),
    [
        ("v1.2.1", PYPROJECT, CHANGELOG, "the tag is v1.2.1, and pyproject.toml has version 1.2.0"),
        ("1.2.0", PYPROJECT, CHANGELOG, "the tag is 1.2.0"),
        ("v1.3.0", PYPROJECT.replace("1.2", "1.3"), CHANGELOG, "no section '## \\[1.3.0\\] - DATE'"),
        ("v1.2.0", PYPROJECT, CHANGELOG.replace("### Added\n\n- this\n", ""), "with entries"),
        ("v1.2.0", PYPROJECT, CHANGELOG.replace("[1.2.0] -", "[1x2.0] -"), "no section"),
    ],
)
def test_what_is_not_ready_is_refused(tag: str, pyproject: str, changelog: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        release_notes(tag, pyproject, changelog)


def test_workflows_run_targets_and_tools_that_exist() -> None:
    text = "".join(path.read_text() for path in (TOP / ".github/workflows").glob("*.yml"))
    targets = {word for line in re.findall(r"\bmake ([a-z][a-z -]*)", text) for word in line.split()}
    assert {"setup", "test", "dist", "docs-site"} <= targets
    makefile = (TOP / "Makefile").read_text()
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    assert not [name for name in re.findall(r"\btools/[\w.-]+", text) if not (TOP / name).is_file()]
    # A tag of another repository can move to other code.
    assert not re.findall(r"uses: (?!\S+@[0-9a-f]{40} # v\d).*", text)


def test_every_statement_names_a_test() -> None:
    enforced = (TOP / "SECURITY.md").read_text().partition("### What trainyard enforces")[2].partition("\n### ")[0]
    rows = [line for line in enforced.splitlines() if re.match(r"\| (?!---|statement)", line)]
    assert len(rows) >= 20
    for row in rows:
        found = re.findall(r"`(tests/[^`:]+\.py)(?:::(\w+))?`", row)
        assert found, row
        for file, name in found:
            assert (TOP / file).is_file(), row
            assert not name or f"def {name}(" in (TOP / file).read_text(), row
