"""The command `import`: its options, and where the run spec goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from trainer.config.fields import MAX_COUNT, Words, declare
from trainer.errors import UserError
from trainer.formats import printable
from trainer.inputs import user_path
from trainyard.import_file.spec_text import TOOLS, import_files
from trainyard.playbook_options import PlaybookOptions

if TYPE_CHECKING:
    ToolName = str
else:
    ToolName = Literal[("auto", *TOOLS)]


class ImportOptions(PlaybookOptions):
    """What is imported, and where the run spec goes."""

    files: Words = declare((), "configuration files of other tools that describe one run together", expected="FILE")
    tool: ToolName = declare("auto", "tool of the files; auto: the one whose names they have")
    ranks: int = declare(
        0,
        "ranks of the original run, which multiply the micro-batches of a step; 0: those in the files, or 1",
        ge=0,
        le=MAX_COUNT,
        unit="ranks",
    )
    output: str = declare("", "file that the run spec is written to; empty: it is printed")


def write_spec(options: ImportOptions, check: bool) -> dict[str, Any]:
    """Return the run spec as lines; with `output`, write it, and return what a user must look at. Raises UserError."""
    if not options.files:
        raise UserError("import: name a configuration file of another tool, such as axolotl.yml")
    files = [user_path(file, "import") for file in options.files]
    imported = import_files(files, options.tool, options.ranks)
    if not options.output:
        return {"lines": imported.lines, "summary": imported.summary}
    path = user_path(options.output, "output")
    try:
        if not check:
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join([*imported.lines, ""]))
    except OSError as error:
        raise UserError(f"output: cannot write {printable(path)}: {error.strerror}") from None
    return {"lines": [*imported.summary, f"{'would write' if check else 'wrote'} {path}"], "file": str(path)}
