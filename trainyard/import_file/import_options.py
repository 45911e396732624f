"""The options of the command `import`."""

from __future__ import annotations

from typing import Literal

from trainer.config.fields import MAX_COUNT, Words, declare
from trainyard.playbook_options import PlaybookOptions


class ImportOptions(PlaybookOptions):
    """What is imported, and where the run spec goes."""

    files: Words = declare((), "configuration files of other tools that describe one run together", expected="FILE")
    tool: Literal["auto", "deepspeed", "accelerate", "transformers", "trl", "axolotl", "llama-factory"] = declare(
        "auto", "tool of the files; auto: the one whose names they have"
    )
    ranks: int = declare(
        0,
        "ranks of the original run, which multiply the micro-batches of a step; 0: those in the files, or 1",
        ge=0,
        le=MAX_COUNT,
        unit="ranks",
    )
    output: str = declare("", "file that the run spec is written to; empty: it is printed")
