"""Launch options: how a run is started, supervised and collected. What a run trains is in the run spec.

This is the only place that declares a launch option. The names for ``-e``, the checks on the controller, the defaults
and the table in the documentation are read off `LaunchOptions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from trainer.common.errors import UserError, nearest
from trainer.common.formats import quoted
from trainer.common.inputs import user_path
from trainer.config.fields import (
    MAX_SECONDS,
    Words,
    declare,
    expected_value,
    mismatch,
    names_in,
)
from trainer.config.removed_fields import REMOVED_OPTIONS, removed, replacement
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.answer_times import LONGEST

_PATHS = ("spec", "render_to", "collect_to")  # options that name a path on the controller
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A line of the file `env` ends with a line feed, and a variable ends with NUL. UTF-8 has no surrogates.
_NOT_IN_VARIABLE = re.compile("[\0\n\ud800-\udfff]")
_MAX_VARIABLES = 1000
_LIMIT = re.compile("((CPU|IO|Limit|Memory|NUMA|Tasks)[A-Za-z0-9]*|AllowedCPUs|Nice|RuntimeMaxSec)=")
HUB_NAME = r"^([A-Za-z0-9_-][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_-][A-Za-z0-9._-]{0,95})?$"
PUSH_FORMS = (
    "what is pushed: result (adapter or model), merged (of a run with merge=true), gguf (for llama.cpp and Ollama)"
)
_MAX_VARIABLE = 64 * 1024  # characters; Linux refuses to start a process with a variable of more than 128 KiB


def _text_values(value: Any) -> Any:
    """Return a mapping with its values as text, because environment variables are text. Raises ValueError."""
    if not isinstance(value, Mapping):
        return {} if value in (None, "") else value
    if len(value) > _MAX_VARIABLES:
        raise ValueError(f"{len(value)} variables, at most {_MAX_VARIABLES} are possible")
    # The messages name no value, because it may be a secret.
    found = {}
    for name, content in value.items():
        if not _VARIABLE.fullmatch(str(name)):
            raise ValueError(f"{quoted(name)} is not a name: use letters, digits and '_'")
        if isinstance(content, Mapping | list | tuple | set):
            raise ValueError(f"the value of {name} is a {type(content).__name__}, expected text")
        found[str(name)] = text = str(content)
        if _NOT_IN_VARIABLE.search(text):
            raise ValueError(f"the value of {name} has a line break, NUL or a lone surrogate: give it as a file")
        if len(text) > _MAX_VARIABLE:
            raise ValueError(f"the value of {name} is longer than {_MAX_VARIABLE // 1024} KiB: give it as a file")
    return found


def _limits(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return properties that only limit a unit. Raises ValueError: another one, which could open it, or change its user."""
    if not all(_LIMIT.match(word) for word in words):
        raise ValueError
    return words


Environment = Annotated[dict[str, str], BeforeValidator(_text_values)]
Port = Annotated[int | None, BeforeValidator(lambda value: None if value == "" else value)]
Seconds = Annotated[float | None, BeforeValidator(lambda value: None if value == "" else value)]


class LaunchOptions(PlaybookOptions):
    """How a run is started and kept alive. The run itself, its steps and its result do not depend on these."""

    spec: str = declare("", "YAML file of the run spec on the controller; `-e` overrides its values")
    limit: str = declare(
        "cluster",
        "host pattern of the hosts that take part; with Ansible, prefer the flag `--limit`",
        deprecated_names=["hosts"],
        min_length=1,
    )
    head: str = declare("", "host that runs rank 0; empty: the first host of the inventory")
    min_nodes: int = declare(
        0,
        "minimum number of hosts to start or continue with; 0 requires all",
        deprecated_names=["nodes_min"],
        ge=0,
        le=10_000,
    )
    max_restarts: int = declare(
        0, "maximum consecutive restarts without progress", deprecated_names=["retries"], ge=0, le=1_000_000
    )
    restart_delay: float = declare(
        1.0,
        "delay before a restart without progress; it doubles each time, up to 60 seconds",
        deprecated_names=["retry_delay"],
        unit="seconds",
        ge=0,
        le=MAX_SECONDS,
    )
    elastic: bool = declare(False, "let torchrun restart the ranks itself with its c10d rendezvous")
    master_port: Port = declare(
        None, "rendezvous port on the head; empty: a free port from 29500 to 29599", ge=1, le=65_535
    )
    run_env: Environment = declare(
        {}, "environment variables for the ranks, such as tokens; they travel in a file of mode 0600"
    )
    unit_properties: Annotated[Words, AfterValidator(_limits)] = declare(
        (),
        "limits of the systemd unit that runs a host's ranks, such as `MemoryMax=20G`",
        expected="limits of a unit, such as MemoryMax=20G: CPU*, Memory*, IO*, Tasks*, NUMA*, Limit*, Nice, AllowedCPUs or RuntimeMaxSec",
    )
    run_shows: Words = declare(
        (),
        "further paths on the hosts that system units show to the ranks, read-only",
    )
    isolate: Literal["auto", "always", "never"] = declare(
        "auto",
        "whether system units limit connections to the run's hosts; auto: if the spec needs no other machine; always: also if it does",
    )
    transfer: Literal["auto", "controller"] = declare(
        "auto",
        "how datasets and models reach the hosts; auto: from host to host, over TLS, where that is faster; controller: from there only",
    )
    progress_interval: float = declare(
        2.0, "minimum time between two progress lines", unit="seconds", ge=0, le=MAX_SECONDS
    )
    stall_limit: float = declare(
        600.0, "time without progress of any rank after which the run fails", unit="seconds", gt=0, le=MAX_SECONDS
    )
    lost_limit: Seconds = declare(
        None,
        "time without an answer after which a host is lost; empty: 2.5 to 10 seconds, by how fast the hosts answer",
        unit="seconds",
        gt=0,
        le=MAX_SECONDS,
    )
    follow: bool = declare(
        True,
        "follow the run to its end; false: return once it has started",
    )
    render_only: bool = declare(
        False, "stage the run and write its commands as scripts for each host and for Slurm, but start nothing"
    )
    render_to: str = declare("", "folder on the controller for the scripts; empty: `runs/RUN/scripts`")
    collect_to: str = declare(
        "", "folder on the controller that receives adapter or model, result, logs and TensorBoard events; empty: none"
    )
    notify: Words = declare(
        (),
        "URLs that get JSON when the run starts, restarts, stops, fails or finishes, and when the queue is empty",
        max_length=20,
    )
    hook: str = declare(
        "",
        "program on the controller that runs at these events, with TRAINYARD_EVENT, TRAINYARD_RUN and TRAINYARD_MESSAGE",
    )
    push: str = declare(
        "",
        "repository of the Hugging Face Hub that gets the result of a finished run; the token is in HF_TOKEN",
        pattern=HUB_NAME,
        expected="OWNER/NAME",
    )
    push_as: Words = declare(("result",), PUSH_FORMS, min_length=1)

    @property
    def answer_limit(self) -> float:
        """Seconds for a host to answer a single request."""
        return LONGEST if self.lost_limit is None else self.lost_limit


OPTIONS: dict[str, FieldInfo] = dict(LaunchOptions.model_fields)


ALIASES: dict[str, str] = names_in(OPTIONS, "deprecated_names")
"""Deprecated names that are still accepted, with the option that each sets."""

REMOVED = removed(REMOVED_OPTIONS, (*OPTIONS, *ALIASES))
"""Options of earlier versions, which are accepted with the default that they had."""


def names() -> frozenset[str]:
    """Return every name of a launch option: the options, their deprecated aliases, and removed ones."""
    return frozenset((*OPTIONS, *ALIASES, *REMOVED))


def make_options(values: Mapping[str, Any], where: str = "the launch options") -> LaunchOptions:
    """Build the options from `values` by name or alias; None takes the default.

    `where`: source of the values, for error messages. Raises UserError: an unknown name, two names of one option with
    different values, or a bad value.
    """
    given: dict[str, Any] = {}
    source: dict[str, str] = {}
    for word, value in values.items():
        name = ALIASES.get(word, word)
        if name in REMOVED:
            if reason := replacement(value, REMOVED[name]):
                raise UserError(f"{name} in {where} {reason}")
            continue
        if name not in OPTIONS:
            raise UserError(f"unknown launch option {quoted(word)} in {where}{nearest(word, sorted(names()))}")
        if value is None:
            continue
        if name in given and given[name] != value:
            raise UserError(f"{source[name]} and {word} set the same option in {where}: set only {name}")
        given[name], source[name] = value, word
    try:
        options = LaunchOptions.model_validate(given)
    except ValidationError as error:
        problems = {str(problem["loc"][0]): problem for problem in error.errors()}
        lines = [f"{source[name]}: {_reason(name, given[name], problem)}" for name, problem in problems.items()]
        raise UserError(f"{'; '.join(lines)} ({where})") from None
    for name in _PATHS:
        user_path(getattr(options, name), name)
    return options


def _reason(name: str, value: Any, problem: Mapping[str, Any]) -> str:
    """Return why an option has no valid value. The values of run_env may be secrets, so they are not shown."""
    if name != "run_env":
        return mismatch(OPTIONS[name], value)
    if isinstance(value, Mapping):
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"expected {expected_value(OPTIONS[name])}, got {type(value).__name__}"


def options_from_variables(
    variables: Mapping[str, Any], resolve: Callable[[Any], Any], overrides: Mapping[str, Any] | None = None
) -> LaunchOptions:
    """Build the options from an inventory's variables: those that are named like an option or a deprecated alias.

    `resolve`: returns the value of a variable, with its templates resolved. `overrides`: options that replace the
    variables. Raises UserError: a bad value.
    """
    found = {name: resolve(variables[name]) for name in sorted(names()) if name in variables}
    if overrides:
        found = {name: value for name, value in found.items() if ALIASES.get(name, name) not in overrides}
    return make_options(found | dict(overrides or {}), "-e or the inventory")
