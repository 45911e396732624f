"""The entry point of the archive on a host: `VERB`, the request as JSON on standard input, the answer as JSON lines.

Standard library only. A verb imports its own module alone: status requests arrive twice a second.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from trainer.supervise.run_files import SupervisorError, set_umask
from trainyard.remote.watch import EndedError, kill_group, watch

# verb: (module, function, seconds); a function takes the request and returns the answer. The limit, longer than the controller waits,
# is for a host whose controller is gone without a trace; `wait` and `grace` of the request are added.
VERBS: dict[str, tuple[str, str, float | None]] = {
    "host_facts": ("trainyard.remote.host_facts", "gather", 120),
    "health": ("trainyard.remote.health", "gather", 600),
    "hardware": ("trainyard.remote.hardware", "gather", 60),
    "mesh": ("trainyard.remote.mesh", "measure", 600),
    "local_files": ("trainyard.remote.local_files", "local_files", 7200),
    "hub_fetch": ("trainyard.remote.hub_fetch", "hub_fetch", 25200),
    "receive": ("trainyard.remote.receive", "receive", 7200),
    "relay": ("trainyard.remote.relay", "relay", 86400),
    "commit": ("trainyard.remote.commit", "commit", 120),
    "ollama": ("trainyard.remote.ollama", "ollama", 9000),
    "read_files": ("trainyard.remote.read_files", "read_files", 1800),
    "exchange": ("trainyard.remote.exchange", "exchange", 7200),
    "queue_info": ("trainyard.remote.queue", "info", 300),
    "queue_add": ("trainyard.remote.queue", "add", 300),
    "queue_again": ("trainyard.remote.queue", "again", 300),
    "queue_change": ("trainyard.remote.queue", "change", 300),
    "checkpoints": ("trainyard.remote.checkpoints", "checkpoints", 120),
    "lease": ("trainyard.remote.lease_state", "lease", 60),
    "merge": ("trainyard.remote.apart", "merge", None),
    "evaluate": ("trainyard.remote.apart", "evaluate", None),
    "gguf_export": ("trainyard.remote.apart", "gguf_export", None),
    "run_start": ("trainer.supervise.start", "start", 120),
    "run_status": ("trainer.supervise.status", "status", 60),
    "run_stop": ("trainer.supervise.stop", "stop", 240),
    "run_list": ("trainer.supervise.status", "list_runs", 60),
    "sample": ("trainyard.remote.sampler", "sample", None),
}
# Half a start, or half a stop, is worse than one without its controller: these end with their work, not with their connection.
FINISH = ("run_start", "run_stop")


def main() -> NoReturn:
    """Carry out one request, print the answer and exit."""
    verb = sys.argv[1]
    ended = False
    set_umask()
    try:
        request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())  # `sample` reads further lines
        if verb not in VERBS:
            raise ValueError(f"unknown verb {verb!r}")
        module, name, limit = VERBS[verb]
        if limit is not None:
            limit += sum(float(request.get(more) or 0) for more in ("wait", "grace"))
        watch(limit, finishes=verb in FINISH)
        function: Callable[[dict[str, Any]], dict[str, Any]] = getattr(importlib.import_module(module), name)
        answer = function(request)
    except (SupervisorError, OSError, ValueError) as error:
        answer = {"error": " ".join(str(error).split())}
    except EndedError as error:
        answer, ended = {"error": f"{verb}: {error}"}, True
    except MemoryError:
        answer = {"error": "not enough memory: end other programs on this host"}
    except Exception as error:
        answer = {"error": "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]}
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(json.dumps(answer), flush=True)
    if ended:
        kill_group()
    # Threads and libraries that are still busy must not delay the answer.
    os._exit(1 if "error" in answer else 0)
