"""Check on the controller, before ranks start, that a run can train on its samples."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomic
from trainer.config import RunSpec
from trainer.config.reward_source import check_columns
from trainer.data.check import check_samples
from trainer.data.data_report import DataReport
from trainer.data.encode import Encoder
from trainer.data.samples import needs_missing_library, samples_of
from trainer.data.shapes import Sample
from trainer.data.text_tokenizer import TextTokenizer


def check_data(
    spec: RunSpec, folder: Path, digest: str, work: Path, samples: Sequence[Sample] | None
) -> DataReport | None:
    """Encode the samples of a run; return their totals, or None if only the hosts can.

    Args:
        spec: with the paths of datasets on the controller.
        folder: of the model.
        digest: of the contents of the datasets.
        work: folder on the controller in which totals are kept.
        samples: those of all datasets, if they were just read.

    Raises UserError: a sample is refused (`file:line: reason`), or more than half of the samples are lost.
    """
    tokenizer = TextTokenizer.read(folder)
    if tokenizer is None or any(needs_missing_library(source.path) for source in spec.sources):
        return None
    encoder = Encoder.of(spec, tokenizer)
    settings = [source.model_dump(mode="json", exclude={"path", "weight"}) for source in spec.sources]
    known = json.dumps([digest, settings, encoder.fingerprint()], sort_keys=True)
    file = work / "checked" / f"{hashlib.sha256(known.encode()).hexdigest()}.json"
    totals = _read(file)
    if any(reward.use == "exact" for reward in spec.reward):
        samples = samples or list(samples_of(spec))
        check_columns(spec.reward, [sample.record["columns"] for sample in samples if sample.record])
    if totals is None:
        samples = samples or list(samples_of(spec))
        totals = check_samples(samples, encoder)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(totals.as_dict()).encode())
    if not totals.unread:  # the ranks count all
        totals.loss.check(spec.allows_dropped)
    return totals


def check_prompts(spec: RunSpec, model: str, chats: Sequence[Sequence[Mapping[str, Any]]], name: str) -> None:
    """Check that the chat template of a student accepts prompts, before teachers answer them.

    `model`: folder of the model; empty if the controller does not have it. `name`: of the prompts, for messages. Raises
    UserError: the template rejects a prompt with an answer.
    """
    tokenizer = TextTokenizer.read(Path(model)) if model else None
    if tokenizer is None:
        return
    answer = {"role": "assistant", "content": "yes"}
    samples = [Sample((*chat, answer), where=f"{name}: prompt {number}") for number, chat in enumerate(chats, 1)]
    check_samples(samples, Encoder.of(spec, tokenizer))


def _read(file: Path) -> DataReport | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return DataReport.of(json.loads(file.read_text(encoding="utf-8")))
    return None
