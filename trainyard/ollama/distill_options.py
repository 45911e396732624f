"""The options of a distillation: the questions for the teachers, and the selection of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.config.fields import MAX_SECONDS, Words, declare
from trainyard import front_end
from trainyard.playbook_options import PlaybookOptions

MIXED = "accept servers with different models of this name"
REMOTE = "accept a model of Ollama's cloud, whose answers are computed outside of this network"


class AnswerOptions(PlaybookOptions):
    """The prompts, and which answers to them become samples."""

    prompts: str = declare(
        "",
        "file, folder or hub id of prompts: the dataset shapes with or without an answer, or records with `prompt`",
        min_length=1,
    )
    samples: int = declare(1, "answers to each prompt", ge=1, le=1000)
    temperature: float = declare(0.7, "temperature of the teacher", ge=0, le=100)
    max_tokens: int = declare(1024, "maximum length of an answer", unit="tokens", ge=1, le=1_000_000)
    system_message: str = declare("", "system message for prompts that have none")
    teachers: Literal["trusted", "all"] = declare(
        "trusted",
        "machines that receive prompts; trusted: the hosts of the cluster; all: also discovered machines that are not trusted",
    )
    teacher_mixed: bool = declare(False, MIXED)
    teacher_remote: bool = declare(False, REMOTE)
    thinking: Literal["drop", "keep"] = declare("drop", "what happens to the teacher's thinking before an answer")
    keep_cut: bool = declare(False, "train on answers that max_tokens has cut off")
    near_duplicates: float = declare(
        0.9, "similarity of two answers from which the second is left out; 0: none is", ge=0, le=1
    )
    eval_prompts: str = declare(
        "", "evaluation prompts, as prompts; answers to prompts that overlap with them are left out"
    )
    answer_limit: float = declare(1800.0, "maximum time for one answer", unit="seconds", gt=0, le=MAX_SECONDS)


class DistillOptions(AnswerOptions):
    """The questions for the teachers, and the selection of answers. What the students train is in the run spec."""

    teacher: str = declare(
        "",
        "name of the model that answers, such as `llama3:8b` of Ollama; with teacher_with=transformers a folder or hub id",
        min_length=1,
    )
    teacher_with: Literal["servers", "transformers"] = declare(
        "servers",
        "what answers; servers: Ollama, or those of teacher_url; transformers: hosts of the cluster with room for the model",
    )
    teacher_url: Words = declare(
        (),
        "servers with the API of OpenAI that have the model, such as `http://10.0.0.5:8000/v1`; none: the Ollama servers of the inventory",
    )
    teacher_pull: bool = declare(False, "pull the model on hosts that do not have it")
    students: int = declare(
        1, "students of each model, each with its own seed; 0: collect the answers only", ge=0, le=1000
    )
    student_data: Literal["all", "shard", "bootstrap"] = declare(
        "all",
        "answers that a student learns from; all: all; shard: its own part, which no other student has; bootstrap: as many as "
        "all, drawn with replacement",
    )
    hybrid: bool = declare(False, "train each student data-parallel over several hosts")


_FIELDS = DistillOptions.model_fields
OPTIONS: dict[str, FieldInfo] = {"teacher": _FIELDS["teacher"], **_FIELDS}


def make_distill_options(values: Mapping[str, Any]) -> DistillOptions:
    """Build the options from the values of ``-e`` that are named like one. Raises UserError for a bad value."""
    given = {name: value for name, value in values.items() if name in OPTIONS}
    for name in ("teacher", "prompts"):
        if not given.get(name):
            value = "MODEL, such as llama3:8b" if name == "teacher" else "FILE"
            raise UserError(f"distill: set {front_end.option(name, value)}")
    return DistillOptions.from_variables(given, "distill")
