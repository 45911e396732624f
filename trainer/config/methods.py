"""The registry of training methods. One line here and the file `trainer/method/NAME.py` with its `PLAN` add a method."""

from typing import Literal, NamedTuple

# What a method learns from: answers; pairs of a chosen and a rejected answer; answers with a label; prompts alone.
Data = Literal["answers", "pairs", "labels", "prompts"]


class MethodEntry(NamedTuple):
    """One method. `summary`: a few words for help texts and documentation; `packs`: a row may hold several samples."""

    data: Data
    summary: str
    packs: bool = False


# Value of the field `method` -> its entry. The first one is the default.
METHODS: dict[str, MethodEntry] = {
    "sft": MethodEntry("answers", "supervised fine-tuning: learn the answers", packs=True),
    "dpo": MethodEntry(
        "pairs", "direct preference optimization: prefer the chosen answer of a pair to the rejected one"
    ),
    "orpo": MethodEntry(
        "pairs", "odds ratio preference optimization: learn the chosen answer and avoid the rejected one"
    ),
    "kto": MethodEntry("labels", "Kahneman-Tversky optimization: learn from answers that are labelled good or bad"),
    "grpo": MethodEntry("prompts", "group relative policy optimization: learn from rewards of the model's own answers"),
}
DEFAULT_METHOD = next(iter(METHODS))
