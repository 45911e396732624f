"""A release: the notes of a tag, and that the workflow runs what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.release_notes import release_notes

TOP = Path(__file__).resolve().parents[2]
PYPROJECT = '[project]\nversion = "1.2.0"\n'
CHANGELOG = """\
# Changelog

## [Unreleased]

- next

## [1.2.0] - 2027-01-31

### Added

- this

## [1.1.0] - 2027-01-01

- before

[1.2.0]: https://example.org
"""


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
