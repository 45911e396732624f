"""Merge the results of runs on the host of the first one, and evaluate the result beside each part."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted, table
from trainer.common.inputs import user_path
from trainer.config.fields import Words, declare, split_words
from trainyard import front_end
from trainyard.ollama.prompts import read_prompts
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.follow.run_status import find_parts, no_such_run
from trainyard.run.launch.trainer_command import apart_request, copy_entry
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.prepare.spec_files import trainer_file
from trainyard.run.stage.transfer import copy_to_hosts
from trainyard.run.types import Report, StepResult
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.copy_files import Exchange, copy_artifacts, in_time
from trainyard.wire.run_errors import RunError

MERGE_LIMIT = 24 * 3600.0  # s
MAX_PROMPTS = 10_000
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATTERNS = ["adapter/*", "model/*", "spec.yml"]
Numbers = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], BeforeValidator(split_words)]


class MergeOptions(PlaybookOptions):
    """What is merged, and how."""

    runs: Words = declare((), "the finished runs, at least two, of one base model", min_length=2, max_length=100)
    method: Literal["cat", "linear", "ties", "dare_ties", "soup", "vote"] = declare(
        "cat",
        "cat: the exact mean of the adapters' updates, whose rank is the sum of theirs; linear, ties, dare_ties: as peft merges "
        "adapters of one rank; soup: the mean of the full weights, as a full model; vote: merge nothing, let the runs "
        "answer a file of prompts",
    )
    weights: Numbers = declare(
        (), "weight of each run, which soup divides by their sum; empty: equal weights that sum to 1", max_length=100
    )
    density: float = declare(0.5, "ties, dare_ties: share of the weights that are kept", gt=0, le=1)
    run: str = declare("merged", "name of the merged run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    prompts: str = declare("", "vote: file of prompts, as for playbooks/distill.yml")
    max_tokens: int = declare(128, "vote: maximum length of an answer", unit="tokens", ge=1, le=100_000)


OPTIONS: dict[str, FieldInfo] = dict(MergeOptions.model_fields)


def make_merge_options(values: Mapping[str, Any]) -> MergeOptions:
    """Build the options from the values of ``-e`` that are named like one. Raises UserError for a bad value."""
    options = MergeOptions.from_variables(values, "merge")
    runs = options.runs
    if wrong := [name for name in runs if not _RUN.fullmatch(name)]:
        listed = f"{front_end.command('status')} lists the runs"
        raise UserError(f"merge: runs: {quoted(wrong[0])} is not the name of a run; {listed}")
    if len(set(runs)) < len(runs) or options.run in runs:
        raise UserError("merge: runs: name each run once, and give the result another name with run=")
    if options.weights and len(options.weights) != len(runs):
        raise UserError(f"merge: weights: expected {len(runs)} numbers, one per run, got {len(options.weights)}")
    if options.weights and (options.method == "vote" or sum(options.weights) <= 0):
        raise UserError("merge: weights: they are divided by their sum, which must be above 0; method=vote takes none")
    if (options.method == "vote") != bool(options.prompts):
        raise UserError("merge: method=vote needs prompts=FILE, and no other method takes it")
    return options


def merge_runs(
    options: MergeOptions,
    hosts: Sequence[Host],
    connect: Callable[[Host], HostConnection],
    launch: LaunchOptions,
    *,
    home: Path,
    report: Report = print,
    check: bool = False,
) -> StepResult:
    """Merge the runs on the host of the first one.

    Returns `changed`; `lines`, the losses of the result, of each part and of the base; `result`. Raises UserError: the
    file of prompts cannot be read; RunError: a run is not there, or the merge fails. `hosts`: on which the runs are
    searched. `home`: folder on the controller for temporary files. `check`: change nothing; report the changes that
    would follow.
    """
    prompts = read_prompts(user_path(options.prompts, "prompts"))[:MAX_PROMPTS] if options.prompts else []
    by_name = {host.name: host for host in hosts}
    places = {run: _place(run, hosts, lambda name: connect(by_name[name]), launch.answer_limit) for run in options.runs}
    target = by_name[places[options.runs[0]][0]]
    report(f"merging {', '.join(options.runs)} on {target.name}")
    if check:
        return {"changed": True, "msg": f"would merge {', '.join(options.runs)} on {target.name}"}
    connection = connect(target)
    folder = f"{target.data_dir}/runs/{options.run}"
    try:
        with tempfile.TemporaryDirectory() as aside:
            parts = []
            for run, (host, run_dir) in places.items():
                if host == target.name:
                    parts.append({"run": run, "folder": run_dir})
                    continue
                copy_artifacts(connect(by_name[host]), run_dir, Path(aside) / run, _PATTERNS)
                _send_part(connection, Path(aside) / run, f"{target.data_dir}/runs", f"{options.run}/parts/{run}")
                parts.append({"run": run, "folder": f"{folder}/parts/{run}"})
            files = [trainer := trainer_file(home / ".trainyard")]
            how = ([copy_entry(target)], files, lambda name: connect(by_name[name]), secrets.token_hex(8))
            copy_to_hosts(*how, transfer=launch.transfer)
        values = options.model_dump(include={"method", "weights", "density", "max_tokens"})
        values |= {"parts": parts, "target": folder, "prompts": prompts}
        request = apart_request(target, trainer, folder, values, MERGE_LIMIT)
        request["reads"] = [part["folder"] for part in parts]
        result = in_time(connection, lambda: connection.call("merge", request), MERGE_LIMIT)
    except RemoteError as error:
        raise RunError(f"{target.name}: {error}") from None
    return {"changed": True, "result": result, "lines": merge_lines(options, result, target.name)}


def _place(run: str, hosts: Sequence[Host], connect: Connect, limit: float) -> tuple[str, str]:
    """Return the host and the folder of a run's rank 0. Raises RunError if there is none, or it is not finished."""
    parts, missing = find_parts(run, hosts, connect, limit)
    if not parts:
        if missing:
            host, error = next(iter(missing.items()))
            raise RunError(f"{host} does not answer ({error}), so run {run} may be there")
        raise no_such_run(run)
    if parts[0].status != "finished":
        raise RunError(f"run {run} is {printable(parts[0].status, 40)}: a merge needs finished runs")
    return parts[0].host, parts[0].run_dir


def _send_part(connection: HostConnection, folder: Path, runs: str, target: str) -> None:
    """Copy a part to the run folder of the result, where a program of a rank may have made links. Raises RemoteError.

    `runs`: the folder of all runs; `target`: the folder of the part below it, which is replaced.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    exchange = Exchange(connection, runs)
    exchange.call()
    for number, name in enumerate(names):
        exchange.put(folder / name, str(number))
    take = {f"{target}/{name}": str(number) for number, name in enumerate(names)}
    exchange.call(remove=[target], take=take, end=True)


def merge_lines(options: MergeOptions, result: Mapping[str, Any], host: str) -> list[str]:
    """Return the result as readable text."""
    why = "the merge gains nothing from them; train them with different seeds (distillation: students=N)"
    warnings = []
    for group in result.get("equal", []):
        equal = ", ".join(options.runs[number] for number in group if number < len(options.runs))
        warnings.append(f"WARNING: {equal} have the same weights: {why} or data (student_data)")
    count = len(options.runs)
    if options.method == "vote":
        asked = f"{result['answers']} prompts answered by {count} runs, {result['unanimous']} unanimously"
        votes = [f"  {each['votes']} of {count}  {printable(each['text'], 100)}" for each in result["first"]]
        return [*warnings, f"{asked}: {result['path']} on {host}", *votes]
    rows = [["", "held-out loss"], ["base", _loss(result.get("base_loss"))]]
    # The names are those of the user, not those of the host's reply.
    rows += [[run, _loss(part["eval_loss"])] for run, part in zip(options.runs, result.get("parts", []), strict=False)]
    rows.append([options.run, _loss(result.get("eval_loss"))])
    kind = "adapter" if result.get("adapter") else "model"
    rank = f" of rank {result['rank']}" if result.get("rank") else ""
    return [
        *warnings,
        f"merged {len(options.runs)} runs by {options.method}; losses on the held-out samples of {options.runs[0]}:",
        *(f"  {line}" for line in table(rows)),
        f"  {kind}{rank}: {result.get(kind, '')} on {host}",
    ]


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
