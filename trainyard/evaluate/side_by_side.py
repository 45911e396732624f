"""Let models answer questions, side by side: runs on the hosts that have them, and models of servers."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.files import to_json, write_atomic
from trainer.common.formats import counted
from trainer.common.inputs import user_path
from trainer.config import OBSERVATORY
from trainer.config.fields import Words, declare
from trainer.generation.ollama_models import GREEDY
from trainyard.deploy.trained_run import TrainedRun, find_copies
from trainyard.evaluate.kept_evaluations import keep_evaluation
from trainyard.evaluate.questions import Question, read_questions
from trainyard.evaluate.scores import Answered, Outputs, answered, summarise
from trainyard.evaluate.subjects import Subject, ask_servers, parse_subjects, server_nodes
from trainyard.ollama.distill_options import MIXED, REMOTE
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.launch.trainer_command import apart_request, copy_entry
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.prepare.spec_files import trainer_file
from trainyard.run.stage.transfer import copy_to_hosts
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.run_errors import RunError

EVALUATE_LIMIT = 24 * 3600.0  # s
MAX_ANSWERED = 1_000_000  # tokens of all answers of one model: the reply of a host is bounded
_SERVER_KINDS = ("ollama", "openai")
Connect = Callable[[Host], HostConnection]
Lines = Callable[[str], None]


class EvaluateOptions(PlaybookOptions):
    """What is evaluated, and with which questions."""

    subjects: Words = declare(
        (),
        "what answers, side by side: runs; base (the base model of the first run) or base:RUN; ollama:MODEL (all servers of the "
        "hosts that have it) or ollama:MODEL@http://ADDRESS:PORT; openai:MODEL@http://ADDRESS:PORT/v1. Each is compared with the first",
        min_length=1,
        max_length=100,
    )
    questions: Words = declare(
        (),
        "files of questions, or the embedded observatory and general; none: observatory",
        max_length=100,
    )
    max_tokens: int = declare(64, "maximum length of an answer", unit="tokens", ge=1, le=100_000)
    eval_batch: int = declare(16, "questions that a model of a run answers together", ge=1, le=1024, unit="questions")
    teacher_mixed: bool = declare(False, MIXED)
    teacher_remote: bool = declare(False, REMOTE)
    show: int = declare(3, "number of questions whose answers are shown, those that changed first", ge=0, le=10_000)
    save: str = declare("", "file on this machine for all answers and scores, as JSON")


OPTIONS: dict[str, FieldInfo] = dict(EvaluateOptions.model_fields)


def evaluate(
    options: EvaluateOptions,
    hosts: Sequence[Host],
    connect: Connect,
    launch: LaunchOptions,
    *,
    home: Path,
    report: Lines = print,
    check: bool = False,
) -> dict[str, Any]:
    """Let all subjects answer all questions.

    Returns `changed`: whether a file was written; `lines`, readable text; `result`, see `summarise`. Raises UserError:
    a file of questions or a subject is not valid, or no host has a run or a model; RunError: a host cannot evaluate its
    runs. `hosts`: on which the runs are searched, and whose Ollama servers answer. `home`: folder of the project, for
    created files. `check`: find the subjects, and ask nothing.
    """
    subjects = parse_subjects(options.subjects)
    questions = read_questions(options.questions or (OBSERVATORY,))
    if len(questions) * options.max_tokens > MAX_ANSWERED:
        raise UserError(
            f"evaluate: max_tokens: {len(questions)} questions with {options.max_tokens} tokens each are more than {MAX_ANSWERED} "
            "tokens: decrease max_tokens, or use fewer questions"
        )
    target = user_path(options.save, "save").absolute() if options.save else None
    by_name = {host.name: host for host in hosts}
    runs = dict.fromkeys(each.model for each in subjects if each.kind not in _SERVER_KINDS)
    connections = {host.name: connect(host) for host in hosts} if runs else {}
    places = {run: _one_of_each_machine(find_copies(run, by_name, connections)) for run in runs}
    accepted = {"mixed": options.teacher_mixed, "remote": options.teacher_remote}
    servers = {each: server_nodes(each, hosts, report, **accepted) for each in subjects if each.kind in _SERVER_KINDS}
    if check:
        return {
            "changed": bool(target),
            "msg": f"would ask {len(questions)} questions of {', '.join(options.subjects)}",
        }
    where = ", ".join(dict.fromkeys(copy.host.name for copies in places.values() for copy in copies))
    report(f"asking {counted(len(questions), 'question')} of {', '.join(options.subjects)}{where and f' on {where}'}")
    found = _ask_runs(subjects, places, questions, options, by_name, connect, launch, home)
    settings = GREEDY | {"num_predict": options.max_tokens}
    for subject, nodes in servers.items():
        found[subject.name] = ask_servers(subject, nodes, questions, settings, report)
    result, lines = summarise(questions, [found[each.name] for each in subjects], options.show)
    if target:
        try:
            write_atomic(target, to_json(result, indent=1))
        except OSError as error:
            raise UserError(f"evaluate: save: cannot write {target}: {error.strerror}") from None
    try:
        keep_evaluation(home / ".trainyard", result)
    except OSError as error:  # the result is complete without it
        report(f"warning: the dashboard does not get the result: {error.strerror}")
    return {"changed": bool(target), "result": result, "lines": lines}


def _one_of_each_machine(copies: Sequence[TrainedRun]) -> list[TrainedRun]:
    """Return the copies of a run on different addresses: two hosts on one machine would only share its cores."""
    found: dict[str, TrainedRun] = {}
    for each in copies:
        found.setdefault(each.host.address, each)
    return list(found.values())


def _ask_runs(
    subjects: Sequence[Subject],
    places: Mapping[str, Sequence[TrainedRun]],
    questions: Sequence[Question],
    options: EvaluateOptions,
    hosts: Mapping[str, Host],
    connect: Connect,
    launch: LaunchOptions,
    home: Path,
) -> dict[str, Outputs]:
    """Let the models of runs answer. All hosts that have a run answer a part of its questions at the same time.

    `places`: the copies of each run. Raises RunError: a host cannot evaluate its part.
    """
    asked = [each for each in subjects if each.kind not in _SERVER_KINDS]
    by_host: dict[str, list[tuple[Subject, TrainedRun, slice]]] = {}
    for subject in asked:
        copies = places[subject.model][: len(questions)]
        for number, copy in enumerate(copies):
            part = slice(number, None, len(copies))
            by_host.setdefault(copy.host.name, []).append((subject, copy, part))
    if not by_host:
        return {}
    trainer = trainer_file(home / ".trainyard")
    texts = [{"messages": list(each.messages), "reference": each.answer} for each in questions]
    request = {"max_tokens": options.max_tokens, "batch_size": options.eval_batch}
    connections = {name: connect(hosts[name]) for name in by_host}  # in the main thread

    def work(name: str) -> list[tuple[str, slice, dict[str, Any]]]:
        replies = []
        for subject, copy, part in by_host[name]:
            values = request | {"folder": copy.folder, "base": subject.kind == "base", "questions": texts[part]}
            apart = apart_request(hosts[name], trainer, copy.folder, values, EVALUATE_LIMIT)
            reply = connections[name].call("evaluate", apart)
            if len(reply["answers"]) != len(texts[part]):
                raise RemoteError(f"answered {len(reply['answers'])} of {len(texts[part])} questions")
            replies.append((subject.name, part, reply))
        return replies

    try:
        entries = [copy_entry(hosts[name]) for name in by_host]
        copy_to_hosts(
            entries, [trainer], lambda name: connect(hosts[name]), secrets.token_hex(8), transfer=launch.transfer
        )
    except RemoteError as error:
        raise RunError(f"evaluate: {error}") from None
    done = FanOut({name: functools.partial(work, name) for name in by_host}).wait(EVALUATE_LIMIT)
    for name, why in done.errors.items():
        raise RunError(f"{name}: {why}")
    parts = [part for replies in done.answers.values() for part in replies]
    return {each.name: _joined(each.name, len(questions), parts) for each in asked}


def _joined(subject: str, count: int, parts: Sequence[tuple[str, slice, dict[str, Any]]]) -> Outputs:
    """Return the report of a subject from the parts that the hosts have sent: the subject's name, which questions, reply."""
    answers: list[Answered | None] = [None] * count
    seconds = 1e-3
    for name, part, reply in parts:
        if name == subject:
            answers[part] = [
                answered(each["text"], each["tokens"], each["cut"], each["loss"], each["loss_tokens"])
                for each in reply["answers"]
            ]
            seconds = max(seconds, reply["seconds"])
    return Outputs(subject, answers, sum(each.tokens for each in answers if each) / seconds)
