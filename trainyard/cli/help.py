"""`--help` and the completion of shells, from the same options as the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.config import describe
from trainer.config.fields import default_of, expected_value, metadata
from trainyard.commands.command_options import SHORT
from trainyard.commands.groups import Group, SpecGroup
from trainyard.commands.table import COMMANDS, COMPLETION, Command

PROGRAM = "trainyard"
_OVERVIEW = f"""\
usage: {PROGRAM} COMMAND [--help] ...

Train language models on a few Linux machines. docs/command-line.md describes the commands, and
{PROGRAM} COMMAND --help their options.
"""
_COMPLETES = "print the script that completes commands and flags in a shell"
_OTHERS = {
    "queue": Command("queue", "add runs to the queue, list or change them", None, ()),
    "completion": Command("completion", _COMPLETES, None, (COMPLETION,), "shell", on_hosts=False),
}
_SCRIPT = """\
_trainyard_words() {
    local command="${COMP_WORDS[1]}" before="${COMP_WORDS[COMP_CWORD-1]}" found
    if [ "$COMP_CWORD" -eq 1 ]; then command=""; fi
    if [ "$command" = queue ]; then command="queue ${COMP_WORDS[2]}"; fi
    case "$command $before" in
%s
    esac
    COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _trainyard_words trainyard
"""
# The script is sourced, or it is the file of a function that zsh has just called.
_ZSH = """\
#compdef trainyard
autoload -U +X bashcompinit && bashcompinit
%s
if [[ $zsh_eval_context[-1] != (eval|file) ]]; then _bash_complete -o default -F _trainyard_words; fi
"""


def help_text(name: str) -> str:
    """Return the help of a command, of `queue` with its verbs, or of the program for an empty name."""
    if name in COMMANDS or name == "completion":
        return _command_help(COMMANDS.get(name) or _OTHERS[name])
    head, listed = _OVERVIEW, {each: command for each, command in COMMANDS.items() if " " not in each} | _OTHERS
    if name == "queue":
        head = f"usage: {PROGRAM} queue VERB [--help] ...\n"
        listed = {each.removeprefix("queue "): one for each, one in COMMANDS.items() if each.startswith("queue ")}
    width = max(map(len, listed)) + 2
    return "\n".join([head, *(f"  {each:<{width}}{command.summary}" for each, command in listed.items())])


def completion(shell: str) -> str:
    """Return the script that completes commands, flags and choices. zsh runs the one of bash."""
    cases = []
    for command in (*COMMANDS.values(), _OTHERS["completion"]):
        fields = [entry for group in _groups(command) for entry in group.fields.items()]
        options = {f"--{name.replace('_', '-')}": _choices(option) for name, option in fields}
        cases += [f'"{command.name} {flag}") found="{" ".join(words)}" ;;' for flag, words in options.items() if words]
        cases.append(f'"{command.name} "*) found="{" ".join(options)}" ;;')
    verbs = [name.removeprefix("queue ") for name in COMMANDS if name.startswith("queue ")]
    cases.append(f'"queue "*) found="{" ".join(verbs)}" ;;')
    cases.append(f'*) found="{" ".join([*(name for name in COMMANDS if " " not in name), *_OTHERS])}" ;;')
    script = _SCRIPT % "\n".join(f"    {case}" for case in cases)
    return _ZSH % script if shell == "zsh" else script


def _command_help(command: Command) -> str:
    words = f" [{command.positional.upper()}]" if command.positional else ""
    same = f" The same as {command.playbook}." if command.playbook else ""
    usage, text = f"{PROGRAM} {command.name}{words} [--FLAG VALUE ...]", f"{command.summary}.{same}"
    parser = argparse.ArgumentParser(PROGRAM, usage, text.replace("%", "%%"), add_help=False)
    for group in _groups(command):
        section = parser.add_argument_group(group.title)
        for name, option in group.fields.items():
            kind: dict[str, Any] = {"action": "store_true"}
            if option.annotation is not bool:
                kind = {"metavar": metavar(option)}
            section.add_argument(*flags(name, option), help=help_of(group, name, option).replace("%", "%%"), **kind)
    return parser.format_help().rstrip("\n")


def _groups(command: Command) -> tuple[Group, ...]:
    return command.groups if command is _OTHERS["completion"] else command.all_groups


def flags(name: str, option: FieldInfo) -> Iterator[str]:
    """Yield the flags of an option: one letter, the word, and its opposite."""
    flag = name.replace("_", "-")
    yield from (f"-{letter}" for letter, long in SHORT.items() if long == name)
    yield f"--{flag}"
    if option.annotation is bool:
        yield f"--no-{flag}"


def help_of(group: Group, name: str, option: FieldInfo) -> str:
    """Return the description of an option, with its default."""
    text = describe(name) if isinstance(group, SpecGroup) else str(option.description)
    default = default_of(option)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
    return f"{text} (default: {shown})" if default not in (None, (), {}, "", ...) else text


def _choices(option: FieldInfo) -> list[str]:
    if get_origin(option.annotation) is not Literal:
        return []
    words = [str(word) for word in get_args(option.annotation)]
    return ["auto", *words] if metadata(option).get("automatic") else words


def metavar(option: FieldInfo) -> str:
    """Return the placeholder of a flag's value."""
    if choices := _choices(option):
        return f"{{{','.join(choices)}}}"
    if expected := metadata(option)["expected"]:
        return str(expected)
    kind = get_origin(option.annotation) or option.annotation
    if kind is str:
        return "TEXT"
    if kind is tuple:
        return "WORD[,WORD...]"
    return expected_value(option).removeprefix("an ").removeprefix("a ")
