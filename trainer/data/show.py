"""Show what a run trains on: the text of samples with the tokens that carry loss marked, what is dropped, and the totals.

`python -m trainer data` and `trainyard data` are this module: on a host with the tokenizer of transformers, on the controller with the
library `tokenizers`.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from trainer.common.errors import UserError
from trainer.common.formats import counted, printable, quoted
from trainer.config import RunSpec
from trainer.data.data_report import NO_DATA, DataReport
from trainer.data.encode import Encoder, Fitted
from trainer.data.shapes import Sample

FEW = 3  # samples that are shown as text
_BRACKETS = ("\u27e6", "\u27e7")
_COLOUR = ("\x1b[30;42m", "\x1b[0m")  # of the background, because spaces are trained, too
_MAX_DROPPED = 20  # lines about further samples that are dropped


@dataclass(frozen=True)
class View:
    """How samples are shown.

    `samples`: number of samples from the first one; None for all. `as_json`: print one JSON object for each sample on
    stdout, and other lines on stderr.
    """

    samples: int | None = None
    as_json: bool = False

    @classmethod
    def of(cls, samples: str | int | None, as_json: bool) -> View:
        """Return the view for the values of `--samples` and `--json`. Raises UserError."""
        text = "" if samples is None else str(samples)
        if not text:
            return cls(None if as_json else FEW, as_json)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise UserError(f"--samples: expected a number of samples, got {quoted(text)}")
        return cls(int(text), as_json)

    def includes(self, number: int) -> bool:
        """Return whether a sample is shown. `number`: its place, from 0."""
        return self.samples is None or number < self.samples

    @property
    def notes(self) -> TextIO:
        """Where lines go that are not about a sample that is shown."""
        return sys.stderr if self.as_json else sys.stdout


def check_shown(spec: RunSpec) -> None:
    if spec.script or spec.fake_data:
        raise UserError(f"data: a run with {'script' if spec.script else 'fake_data'} reads no samples: omit it")


def show(samples: Iterable[Sample], encoder: Encoder, view: View) -> DataReport:
    """Print samples and the totals of all samples, which are returned. Raises UserError if a run would refuse one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters of the text
            stream.reconfigure(errors="backslashreplace")
    report, hidden = NO_DATA, 0
    # https://no-color.org
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    marks = _COLOUR if coloured else _BRACKETS
    for number, sample in enumerate(samples):
        parts, one = encoder.rows(sample)
        report += one
        for place, fitted in enumerate(parts, 1):
            row = sample.at(f"{sample.where} row {place} of {len(parts)}") if len(parts) > 1 else sample
            if not view.includes(number):
                hidden += bool(fitted.dropped)
                if fitted.dropped and hidden <= _MAX_DROPPED:
                    print(_headline(row, fitted), file=view.notes)
            elif view.as_json:
                print(json.dumps(_record(row, fitted, encoder)))
            elif place <= FEW:
                print("\n".join([_headline(row, fitted), *_body(fitted, encoder, marks), ""]))
    if hidden > _MAX_DROPPED:
        print(f"{counted(hidden - _MAX_DROPPED, 'further sample')} dropped", file=view.notes)
    for line in report.lines():
        print(line, file=view.notes)
    return report


def _record(sample: Sample, fitted: Fitted, encoder: Encoder) -> dict[str, object]:
    other = fitted.rejected
    return {
        "source": sample.where,
        "ids": fitted.ids,
        "trained": list(map(int, fitted.trained)),
        "text": encoder.decode(fitted.ids),
        "truncated": fitted.truncated,
        "dropped": fitted.dropped or None,
        "notes": list(fitted.notes),
        **({"label": fitted.desirable} if fitted.desirable is not None else {}),
        **({"rejected": _record(sample, other, encoder)} if other else {}),
    }


def _headline(sample: Sample, fitted: Fitted) -> str:
    line = f"{printable(sample.where, 1000)}: "
    if fitted.desirable is not None:
        line += f"{'good' if fitted.desirable else 'bad'} answer: "
    line += f"chosen: {_size(fitted)}; rejected: {_size(fitted.rejected)}" if fitted.rejected else _size(fitted)
    return line + (f"; dropped: {printable(fitted.dropped)}" if fitted.dropped else "")


def _size(fitted: Fitted) -> str:
    size = f"{counted(len(fitted.ids), 'token')}, {sum(fitted.trained)} with loss"
    lost = f"; truncated: {counted(fitted.truncated, 'further token')} beyond seq_length" if fitted.truncated else ""
    return size + lost


def _body(fitted: Fitted, encoder: Encoder, marks: tuple[str, str]) -> list[str]:
    """Return the lines of a sample's text, with marks around what carries loss, and notes about it."""
    if fitted.rejected:
        chosen = _body(replace(fitted, rejected=None), encoder, marks)
        return ["chosen:", *chosen, "rejected:", *_body(fitted.rejected, encoder, marks)]
    text = "".join(_marked(piece, marks) if trained else _shown(piece) for piece, trained in _pieces(fitted, encoder))
    return [*text.removesuffix("\n").split("\n"), *(f"note: {printable(note)}" for note in fitted.notes)]


def _pieces(fitted: Fitted, encoder: Encoder) -> Iterator[tuple[str, bool]]:
    """Yield the texts of neighbouring tokens that all carry loss, or all do not, and which of both."""
    end, before = 0, ""
    for trained, group in itertools.groupby(fitted.trained):
        start, end = end, end + len(list(group))
        # Decoders remove a space at the start: a piece is what its tokens add to the text before it.
        whole = encoder.decode(fitted.ids[:end])
        yield whole[len(before) :] if whole.startswith(before) else encoder.decode(fitted.ids[start:end]), trained
        before = whole


def _marked(text: str, marks: tuple[str, str]) -> str:
    begin, end = marks
    if marks is _BRACKETS:
        return f"{begin}{_shown(text)}{end}"
    return "\n".join(f"{begin}{line}{end}" for line in _shown(text).split("\n"))


def _shown(text: str) -> str:
    """Return text of a dataset, which a terminal must not execute, in its lines; brackets in it are escaped."""
    lines = ["\t".join(printable(part, 10 * len(part)) for part in line.split("\t")) for line in text.split("\n")]
    return "\n".join(lines).translate({ord(mark): f"\\u{ord(mark):04x}" for mark in _BRACKETS})
