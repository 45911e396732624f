"""Encode the samples of a run before it starts: all of them if that takes seconds, else a spread over them. No torch."""

import random
import time
from collections.abc import Hashable, Sequence

from trainer.data.data_report import DataReport
from trainer.data.encode import Encoder
from trainer.data.shapes import Sample

BUDGET = 8.0  # s
_PROBED = 64  # samples that show how long all will take


def check_samples(samples: Sequence[Sample], encoder: Encoder, budget: float = BUDGET) -> DataReport:
    """Return the totals of samples, at least one; of a part of them if `budget` seconds are too short for all.

    Then as many samples as possible are rendered, because templates reject samples and tokenizers do not, and the rest
    of the time goes to the totals. The first sample of every structure comes first, that of a rare one before that of a
    frequent one: templates reject a chat for its roles and keys more often than for its text. Raises UserError: a
    sample cannot be encoded.
    """
    ends = time.monotonic() + budget
    first, others = _spread(samples)
    places = [*first, *others]
    totals, read = _report(samples[places[0]], encoder), 1  # compiles the template
    begun = time.monotonic()
    for place in places[1:_PROBED]:
        totals += _report(samples[place], encoder)
        read += 1
    if begun + (time.monotonic() - begun) / max(1, read - 1) * len(places) > ends:
        for place in places[read:]:
            if time.monotonic() > ends:
                break
            encoder.check(samples[place])
    for place in places[read:]:
        if time.monotonic() > ends:
            break
        totals += _report(samples[place], encoder)
        read += 1
    return totals + DataReport(unread=len(places) - read)


def _report(sample: Sample, encoder: Encoder) -> DataReport:
    return encoder.rows(sample)[1]


def _spread(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Return the place of the first sample of every structure, the rarest one first, and the places of all other samples, mixed."""
    places: dict[Hashable, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(_structure(sample), []).append(place)
    others = [place for group in places.values() for place in group[1:]]
    random.Random(1).shuffle(others)
    return [group[0] for group in sorted(places.values(), key=len)], others


def _structure(sample: Sample) -> Hashable:
    """Return what two samples have in common that differ only in their texts and their length."""
    kinds = [
        (message["role"], *sorted(name for name, value in message.items() if value)) for message in sample.messages
    ]
    pieces = tuple(trained for text, trained in sample.pieces if text.strip())
    return frozenset(zip([(), *kinds], [*kinds, ()], strict=True)), pieces, bool(sample.tools)
