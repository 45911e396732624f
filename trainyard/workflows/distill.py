"""Distillation: prompts are answered by the teachers of the cluster, and students train on the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.common.inputs import user_path
from trainer.config import TINY, RunSpec
from trainer.config.fields import split_words
from trainer.config.run_spec import DROPPED
from trainyard.extra_vars import read_run_spec
from trainyard.inventory import ClusterHosts
from trainyard.ollama.answers import AnswerFile, answers_path
from trainyard.ollama.collect import Collect, Questions, make_dataset
from trainyard.ollama.distill_options import OPTIONS, DistillOptions, make_distill_options
from trainyard.ollama.openai_node import openai_teachers
from trainyard.ollama.prompts import read_evaluation, read_prompts
from trainyard.ollama.teacher_nodes import OllamaNode
from trainyard.ollama.teachers import candidates, find_teachers
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.prepare.model_files import special_tokens
from trainyard.run.session import RunSession
from trainyard.run.types import Report
from trainyard.wire.run_errors import RunError
from trainyard.workflows.host_teachers import HostTeachers
from trainyard.workflows.students import student_table, train_students


def student_specs(
    options: DistillOptions, file: str, extra_vars: Mapping[str, Any], top: Path, report: Report
) -> list[RunSpec]:
    """Return the run specs of the students, `students` of each model of ``-e model=a,b``; the dataset is not known yet.

    Each further student of a model has the next seed. All students have the same held-out samples. Raises UserError: an
    unknown name, or a bad value. `file`: YAML file of the run spec, or empty. `extra_vars`: all variables given with
    ``-e``. `top`: the project's folder.
    """
    rest = {name: value for name, value in extra_vars.items() if name not in OPTIONS}
    if "dataset" in rest:
        raise UserError("distill: the dataset is made of the teacher's answers: set prompts instead of dataset")
    models = (split_words(rest.get("model", "")) or [""]) * max(1, options.students)
    specs: list[RunSpec] = []
    for number, model in enumerate(models, 1):
        values = rest | ({"model": model} if model else {})
        if rest.get("run") and len(models) > 1:
            values["run"] = f"{rest['run']}-{number}"
        spec = read_run_spec(file, values, top, report if number == 1 else lambda line: None)
        change: dict[str, Any] = {} if "eval_start" in spec.model_fields_set else {"eval_start": True}
        if earlier := models[: number - 1].count(model):
            change |= {"seed": (spec.seed + earlier) % 2**32, "shared_seed": spec.common_seed}
        if options.student_data != "all":
            part = f":{number}/{len(models)}" if options.student_data == "shard" else ""
            change["data_part"] = options.student_data + part
        specs.append(spec.model_copy(update=change))
    return specs


def distill(
    values: Mapping[str, Any],
    cluster: ClusterHosts,
    top: Path,
    report: Report,
    check: bool,
) -> dict[str, Any]:
    """Run the distillation that the values of ``-e`` of playbooks/distill.yml specify: ask the teachers, filter the answers, and
    train the students.

    `top`: the project's folder. `report`: receives lines while the teachers answer and the students train. `check`:
    send no prompts and change nothing; report the changes that would follow. Returns `changed`; `lines`, readable text;
    `dataset`, its path; `answers`, the number of its samples; `students`, the result.json of each student that has
    finished, by run. Raises UserError: a mistake in the values. No host has received a request yet, unless only hosts
    can check the value; RunError: a student failed; InventoryError: a host is not described completely.
    """
    options, launch = make_distill_options(values), cluster.launch_of({})
    specs = student_specs(options, launch.spec, values, top, report)
    models = {spec.model: _checked_model(spec, cluster, launch, top, report) for spec in specs if spec.model != TINY}
    questions, evaluation = _questions(options, specs, models), read_evaluation(options, specs[0])
    nodes, collect = _teachers(options, cluster, launch, top, report, check)
    names = ", ".join(printable(node.name, 40) for node in nodes)
    report(f"{options.teacher} teaches on {names}: {len(questions.chats)} prompts x {options.samples}")
    if check:
        return {"changed": True, "msg": f"would ask {len(questions)} answers of {names}"}
    work = top / ".trainyard"
    with AnswerFile(answers_path(work, options.teacher)) as answers:
        allowed = all(spec.allows_dropped for spec in specs)
        how = (questions, evaluation, nodes, answers, work / "distill", report)
        special = {token for folder in models.values() if folder for token in special_tokens(Path(folder))}
        dataset, filtered = make_dataset(*how, allow_dropped=allowed, special=special, collect=collect)
    report(f"dataset: {dataset}")
    made = {"changed": True, "dataset": str(dataset), "answers": len(filtered.samples), "students": {}}
    lines = [*filtered.lines(), f"dataset: {dataset}"]
    if not options.students:
        return made | {"lines": lines}
    # The settings of the prompts are not those of the dataset.
    change = {"dataset_split": "train", "dataset_config": "", "columns": {}, "keep_going": (DROPPED,) * allowed}
    specs = [spec.model_copy(update={"dataset": str(dataset), **change}) for spec in specs]
    runs = train_students(specs, cluster.hosts, cluster.connect, launch, hybrid=options.hybrid, home=top, report=report)
    failed = {run.run: run.error for run in runs if run.error}
    students = {run.run: run.result for run in runs}
    trained: dict[str, Any] = {"changed": True, "lines": [*lines, *student_table(runs)], "students": students}
    if failed:
        run, why = next(iter(failed.items()))
        more = f" ({len(failed)} of {len(specs)} students failed)" if len(specs) > 1 else ""
        raise RunError(f"{run}: {why}{more}", **trained, failed=failed)
    return made | trained


def _checked_model(spec: RunSpec, cluster: ClusterHosts, launch: LaunchOptions, top: Path, report: Report) -> str:
    """Check the model of a student before the teachers work for hours; return its folder if it is on the controller."""
    alone = spec.model_copy(update={"fake_data": True})
    session = RunSession(cluster.hosts, cluster.connect, launch, spec=alone, home=top, report=report)
    session.prepare()
    return next((file.src for file in session.prepared.files if file.kind == "model"), "")


def _questions(options: DistillOptions, specs: Sequence[RunSpec], models: Mapping[str, str]) -> Questions:
    """Return the questions for the teachers, which every student can learn from. Raises UserError.

    Args:
        models: folders on the controller, by the names in the specs.
    """
    # It imports numpy, which a program that only follows runs does not need.
    from trainyard.run.prepare.data_check import check_prompts

    first = specs[0]
    chats = read_prompts(user_path(options.prompts, "prompts"), options.system_message, first)
    for spec in specs:
        if spec.model != TINY:
            check_prompts(spec, models[spec.model], chats, printable(options.prompts))
    return Questions(chats, options, first.common_seed)


def _teachers(
    options: DistillOptions,
    cluster: ClusterHosts,
    launch: LaunchOptions,
    top: Path,
    report: Report,
    check: bool,
) -> tuple[Sequence[Any], Collect | None]:
    """Return what teaches, and what asks it if it is no server. Raises UserError."""
    if options.teacher_with == "transformers":
        if options.teacher_url:
            raise UserError("distill: teacher_url names servers: omit it, or teacher_with=transformers")
        hosts = HostTeachers(cluster, launch, options.teacher, top, report, check)
        return hosts.nodes, hosts.collect
    if options.teacher_url:
        how = (options.teacher_url, options.teacher, options.answer_limit, options.teacher_remote)
        return openai_teachers(*how), None
    return _ollama_teachers(options, cluster, report, check), None


def _ollama_teachers(options: DistillOptions, cluster: ClusterHosts, report: Report, check: bool) -> list[OllamaNode]:
    """Return the Ollama servers that teach. Raises UserError."""
    return find_teachers(
        candidates(cluster.groups["cluster"], cluster.groups.get("discovered", []), cluster.variables),
        options.teacher,
        untrusted=options.teachers == "all",
        mixed=options.teacher_mixed,
        remote=options.teacher_remote,
        pull=options.teacher_pull and not check,
        limit=options.answer_limit,
        report=report,
    )
