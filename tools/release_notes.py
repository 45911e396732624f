"""Print the section of CHANGELOG.md on a tag, as the notes of its release. Fails if the tag is not the version of pyproject.toml.

python tools/release_notes.py v0.2.0
"""

import re
import sys
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]


def release_notes(tag: str, pyproject: str, changelog: str) -> str:
    """Return the notes of a release.

    Raises:
        ValueError: the tag is not the version, or the changelog has nothing on the version.
    """
    version = tomllib.loads(pyproject)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml has version {version}: tag v{version}")
    # Its heading has the date; the links of the versions end the last section.
    section = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |^\[|\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if not section or not section[1].strip():
        raise ValueError(f"CHANGELOG.md has no section '## [{version}] - DATE' with entries: rename [Unreleased]")
    return section[1].strip() + "\n"


def main() -> None:
    """Print the notes of the release of a tag."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/release_notes.py TAG")
    files = (TOP / name for name in ("pyproject.toml", "CHANGELOG.md"))
    try:
        print(release_notes(sys.argv[1], *(file.read_text(encoding="utf-8") for file in files)), end="")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
