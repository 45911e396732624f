"""Let models answer questions, side by side: runs on the hosts that have them, and models of servers."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.files import to_json, write_atomic
from trainer.common.formats import counted
from trainer.common.inputs import user_path
from trainer.config import OBSERVATORY
from trainer.config.fields import Words, declare
from trainyard.deploy.trained_run import find_run
from trainyard.evaluate.kept_evaluations import keep_evaluation
from trainyard.evaluate.questions import Question, read_questions
from trainyard.evaluate.scores import Answered, Report, summarise
from trainyard.evaluate.subjects import Subject, ask_servers, parse_subjects, server_nodes
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.launch.trainer_command import apart_request, copy_entry
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.prepare.spec_files import trainer_file
from trainyard.run.session import KeepRecord
from trainyard.run.stage.transfer import copy_to_hosts
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.run_errors import RunError

EVALUATE_LIMIT = 24 * 3600.0  # s
MAX_ANSWERED = 1_000_000  # tokens of all answers of one model: the reply of a host is bounded
ANSWERED = tuple(field.name for field in fields(Answered))
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
        "files of questions, or the embedded observatory and general; none: observatory, unless there are tasks",
        max_length=100,
    )
    tasks: Words = declare(
        (),
        "tasks of the package lm_eval, such as arc_easy, for runs and bases; the hosts have the package",
        max_length=100,
    )
    task_limit: int = declare(0, "number of the first samples of each task; 0: all", ge=0, le=1_000_000)
    max_tokens: int = declare(64, "maximum length of an answer", unit="tokens", ge=1, le=100_000)
    eval_batch: int = declare(16, "questions that a model of a run answers together", ge=1, le=1024, unit="questions")
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
    keep_record: KeepRecord | None = None,
) -> dict[str, Any]:
    """Let all subjects answer all questions.

    Args:
        hosts: on which the runs are searched, and whose Ollama servers answer.
        home: folder of the project, for created files.
        check: find the subjects, and ask nothing.
        keep_record: keeps a record of the result, with its name and contents, for the service of the dashboard.

    Returns:
        `changed`: whether a file was written; `lines`, readable text; `result`, see `summarise`.

    Raises:
        UserError: a file of questions or a subject is not valid, or no host has a run or a model.
        RunError: a host cannot evaluate its runs.
    """
    subjects = parse_subjects(options.subjects)
    if options.tasks and (served := [each.name for each in subjects if each.kind in _SERVER_KINDS]):
        raise UserError(
            f"evaluate: tasks: servers do not give the probabilities that lm_eval needs: leave out {served[0]}"
        )
    questions = read_questions(options.questions or (() if options.tasks else (OBSERVATORY,)))
    if len(questions) * options.max_tokens > MAX_ANSWERED:
        raise UserError(
            f"evaluate: max_tokens: {len(questions)} questions with {options.max_tokens} tokens each are more than {MAX_ANSWERED} "
            "tokens: decrease max_tokens, or use fewer questions"
        )
    target = user_path(options.save, "save").absolute() if options.save else None
    by_name = {host.name: host for host in hosts}
    runs = dict.fromkeys(each.model for each in subjects if each.kind not in _SERVER_KINDS)
    connections = {host.name: connect(host) for host in hosts} if runs else {}
    found_runs = {run: find_run(run, by_name, connections, with_base=False) for run in runs}
    places = {run: (found.host.name, found.folder) for run, found in found_runs.items()}
    servers = {each: server_nodes(each, hosts, report) for each in subjects if each.kind in _SERVER_KINDS}
    if check:
        return {
            "changed": bool(target),
            "msg": f"would ask {len(questions)} questions of {', '.join(options.subjects)}",
        }
    what = [counted(len(questions), "question"), *options.tasks]
    report(f"asking {', '.join(what)} of {', '.join(options.subjects)}")
    found = _ask_runs(subjects, places, questions, options, by_name, connect, launch, home)
    settings = {"temperature": 0.0, "num_predict": options.max_tokens, "seed": 1}
    for subject, nodes in servers.items():
        found[subject.name] = ask_servers(subject, nodes, questions, settings, report)
    result, lines = summarise(questions, [found[each.name] for each in subjects], options.show)
    if target:
        try:
            write_atomic(target, to_json(result, indent=1))
        except OSError as error:
            raise UserError(f"evaluate: save: cannot write {target}: {error.strerror}") from None
    try:
        if questions:
            name, content = keep_evaluation(home / ".trainyard", result)
            if keep_record:
                keep_record(name, content)
    except OSError as error:  # the result is complete without it
        report(f"warning: the dashboard does not get the result: {error.strerror}")
    return {"changed": bool(target), "result": result, "lines": lines}


def _ask_runs(
    subjects: Sequence[Subject],
    places: Mapping[str, tuple[str, str]],
    questions: Sequence[Question],
    options: EvaluateOptions,
    hosts: Mapping[str, Host],
    connect: Connect,
    launch: LaunchOptions,
    home: Path,
) -> dict[str, Report]:
    """Let the models of runs answer on the hosts that have them; the hosts work at the same time. Raises RunError.

    Args:
        places: host and run folder of each run.
    """
    by_host: dict[str, list[Subject]] = {}
    for subject in subjects:
        if subject.model in places and subject.kind not in _SERVER_KINDS:
            by_host.setdefault(places[subject.model][0], []).append(subject)
    if not by_host:
        return {}
    trainer = trainer_file(home / ".trainyard")
    request = {
        "questions": [{"messages": list(each.messages), "reference": each.answer} for each in questions],
        "max_tokens": options.max_tokens,
        "batch_size": options.eval_batch,
        "tasks": list(options.tasks),
        "task_limit": options.task_limit,
    }

    connections = {name: connect(hosts[name]) for name in by_host}  # in the main thread

    def work(name: str) -> dict[str, Any]:
        found = {}
        for subject in by_host[name]:
            folder = places[subject.model][1]
            values = request | {"folder": folder, "base": subject.kind == "base"}
            reply = connections[name].call(
                "evaluate",
                apart_request(hosts[name], trainer, folder, values, EVALUATE_LIMIT) | {"online": bool(options.tasks)},
            )
            if len(reply["answers"]) != len(questions):
                raise RemoteError(f"answered {len(reply['answers'])} of {len(questions)} questions")
            answers = [Answered(**{name: each[name] for name in ANSWERED}) for each in reply["answers"]]
            seconds = max(reply["seconds"], 1e-3)
            speed = sum(each.tokens for each in answers) / seconds
            found[subject.name] = Report(subject.name, answers, speed, reply.get("tasks", {}))
        return found

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
    return {name: report for reports in done.answers.values() for name, report in reports.items()}
