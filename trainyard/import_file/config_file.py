"""Read a configuration file of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.common.inputs import path_kind, user_path
from trainer.config import read_yaml
from trainer.config.tool_files import read_object
from trainyard.import_file.translation import Translation


def read_names(path: Path) -> dict[str, Any]:
    """Return the names and values of a file in JSON, if its name ends so, or in YAML. Raises UserError."""
    return read_object(path, "import") if path.suffix == ".json" else read_yaml(path, "import")


def find_file(found: Translation, text: str) -> Path | None:
    """Return the file that a file names: relative to the working directory, to the file, or to a folder above it. Raises UserError."""
    path = user_path(text, "import")
    places = [path, *(folder / path for folder in found.where.absolute().parents)]
    return next((place for place in places if path_kind(place) == "file"), None)
