"""The program `trainyard`.

Exit codes: 0 finished, 1 failed, 2 a mistake of the user, 99 interrupted by Ctrl-C (as ansible-playbook).
"""

from __future__ import annotations

import importlib.util
import locale
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.common.errors import UserError, memory_failure, nearest
from trainer.common.formats import quoted
from trainer.common.utf8 import require_utf8
from trainyard import front_end
from trainyard.cli.output import Output
from trainyard.project_folder import FOREIGN, foreign_package, pip_install, project_folder

INTERRUPTED = 99
_UTF8_LOCALE = "C.UTF-8"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = with_verb(list(sys.argv[1:] if argv is None else argv))
    if importlib.util.find_spec("ansible") is None:
        command = pip_install(["ansible-core"])
        print(f"error: the command line needs the package ansible: run {command}", file=sys.stderr)
        return 2
    if foreign := foreign_package():
        print(f"warning: {FOREIGN.format(version=foreign, python=sys.executable)}", file=sys.stderr)
    output = Output(as_json="--json" in words)  # for errors in the words themselves
    try:
        require_utf8()
        set_locale()
        with front_end.serving_program():
            return _dispatch(words)
    except UserError as error:
        output.error(error)
        return 2
    except MemoryError as error:
        output.error(UserError(memory_failure(error)))
        return 1
    except KeyboardInterrupt:
        output.error("interrupted; a run that has started continues: trainyard attach follows, trainyard stop ends it")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if type(error).__module__ != "ansible.errors":
            raise
        output.error(UserError(f"Ansible does not start: {error}: set HOME to a folder that you can write"))
        return 2


def set_locale() -> None:
    """Set a locale with UTF-8, without which Ansible does not start, where the environment has none. Raises UserError."""
    if (locale.getlocale()[1] or "").lower() in ("utf-8", "utf8"):
        return
    try:
        locale.setlocale(locale.LC_ALL, _UTF8_LOCALE)
    except locale.Error:
        raise UserError("locale: Ansible needs one with UTF-8: set LC_ALL to a name that locale -a lists") from None
    os.environ["LC_ALL"] = _UTF8_LOCALE


def with_verb(words: list[str]) -> list[str]:
    """Join the two words of a command such as `queue add`."""
    if words[:1] == ["queue"] and len(words) > 1 and not words[1].startswith("-"):
        return [f"queue {words[1]}", *words[2:]]
    return words


def _dispatch(words: list[str]) -> int:
    from trainyard.commands.table import COMMANDS

    before = words[: words.index("--")] if "--" in words else words
    asks = {"-h", "--help"} & set(before)
    if asks and (words[0].startswith("-") or words[0] in (*COMMANDS, "queue", "completion")):
        from trainyard.cli.help import help_text

        print(help_text("" if words[0].startswith("-") else words[0]))
        return 0
    if words[:1] == ["completion"]:
        return _completion(words[1:])
    if not words or words[0] not in COMMANDS:
        if words and (near := nearest(words[0], COMMANDS)):
            raise UserError(f"unknown command {quoted(words[0])}{near} trainyard --help describes all commands")
        said = f"unknown command {quoted(words[0])}" if words else "name a command"
        raise UserError(f"{said}: {', '.join([*COMMANDS, 'completion'])}; --help describes them")
    return _run(words[0], words[1:])


def _completion(words: list[str]) -> int:
    """Print the script of a shell."""
    from trainyard.cli.command_flags import parse
    from trainyard.cli.help import completion
    from trainyard.commands.command_options import CompletionOptions
    from trainyard.commands.table import COMPLETION

    given = parse("completion", (COMPLETION,), "shell", words).of(COMPLETION)
    print(completion(CompletionOptions.from_variables(given, "completion").shell), end="")
    return 0


def _run(name: str, words: list[str]) -> int:
    from trainyard.cli.command_flags import parse
    from trainyard.cli.front import run_command
    from trainyard.cli.playbooks import PlaybookError
    from trainyard.commands.table import COMMANDS
    from trainyard.wire.connection import InventoryError, RemoteError
    from trainyard.wire.run_errors import RunError

    arguments = parse(name, COMMANDS[name].all_groups, COMMANDS[name].positional, words)
    output, top = Output(arguments.switch("json")), Path.cwd()
    try:
        if COMMANDS[name].on_hosts:
            top = project_folder()
            os.environ.setdefault("ANSIBLE_CONFIG", str(top / "ansible.cfg"))
        result = run_command(COMMANDS[name], arguments, top, output)
        if result is not None:
            output.result(result)
        return 0
    except (UserError, InventoryError) as error:
        output.error(error)
        return 2
    except (RunError, RemoteError) as error:
        output.error(error, getattr(error, "details", {}))
        return 1
    except PlaybookError as error:
        output.error(error)
        return error.code
    finally:
        if "trainyard.ansible_adapter" in sys.modules:
            sys.modules["trainyard.ansible_adapter"].end_requests()


if __name__ == "__main__":
    sys.exit(main())
