"""The command line of the supervisor; see the package."""

from __future__ import annotations

import json
import sys

from trainer.supervise.run_files import SupervisorError, set_umask


def main() -> int:
    """Carry out one verb and print its answer; return the exit code."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    set_umask()
    try:
        if verb == "run":
            from trainer.supervise.supervisor import run_supervisor

            run_supervisor(sys.argv[2:])
            return 0
        answer, code = carry_out(verb, json.loads(sys.stdin.buffer.read())), 0
    except (SupervisorError, OSError, ValueError, KeyError) as error:
        answer, code = {"error": " ".join(str(error).split())}, 1
    except MemoryError:
        answer, code = {"error": "not enough memory: end other programs on this host"}, 1
    print(json.dumps(answer), flush=True)
    return code


def carry_out(verb: str, request: dict[str, object]) -> dict[str, object]:
    """Return the answer to a request. Raises SupervisorError."""
    if verb == "start":
        from trainer.supervise.start import start as action
    elif verb == "stop":
        from trainer.supervise.stop import stop as action
    elif verb == "status":
        from trainer.supervise.status import status as action
    elif verb == "list":
        from trainer.supervise.status import list_runs as action
    else:
        raise SupervisorError(f"unknown verb {verb!r}; use start, status, stop, list or run")
    return action(request)


if __name__ == "__main__":
    sys.exit(main())
