"""The entry point of the archive on a host: `VERB`, the request as JSON on standard input, the answer as JSON lines.

Standard library only. A verb imports its own module alone: status requests arrive twice a second.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from trainer.supervise.files import SupervisorError, set_umask

# verb: (module, function); a function takes the request and returns the answer.
VERBS = {
    "host_facts": ("trainyard.remote.host_facts", "gather"),
    "health": ("trainyard.remote.health", "gather"),
    "hardware": ("trainyard.remote.hardware", "gather"),
    "mesh": ("trainyard.remote.mesh", "measure"),
    "all_reduce": ("trainyard.remote.all_reduce", "measure"),
    "local_files": ("trainyard.remote.local_files", "local_files"),
    "hub_fetch": ("trainyard.remote.hub_fetch", "hub_fetch"),
    "receive": ("trainyard.remote.receive", "receive"),
    "relay": ("trainyard.remote.relay", "relay"),
    "commit": ("trainyard.remote.commit", "commit"),
    "ollama": ("trainyard.remote.ollama", "ollama"),
    "read_files": ("trainyard.remote.read_files", "read_files"),
    "keep_record": ("trainyard.remote.keep_record", "keep_record"),
    "slurm_check": ("trainyard.remote.slurm", "check"),
    "queue_info": ("trainyard.remote.queue", "info"),
    "queue_add": ("trainyard.remote.queue", "add"),
    "queue_again": ("trainyard.remote.queue", "again"),
    "queue_change": ("trainyard.remote.queue", "change"),
    "checkpoints": ("trainyard.remote.checkpoints", "checkpoints"),
    "lease": ("trainyard.remote.lease", "lease"),
    "merge": ("trainyard.remote.apart", "merge"),
    "gguf_export": ("trainyard.remote.apart", "gguf_export"),
    "run_start": ("trainer.supervise.start", "start"),
    "run_prepare": ("trainer.supervise.start", "prepare"),
    "run_status": ("trainer.supervise.status", "status"),
    "run_stop": ("trainer.supervise.stop", "stop"),
    "run_list": ("trainer.supervise.status", "list_runs"),
    "sample": ("trainyard.remote.sampler", "sample"),
}


def main() -> NoReturn:
    """Carry out one request, print the answer and exit."""
    verb = sys.argv[1]
    set_umask()
    try:
        request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())  # `sample` reads further lines
        if verb not in VERBS:
            raise ValueError(f"unknown verb {verb!r}")
        module, name = VERBS[verb]
        function: Callable[[dict[str, Any]], dict[str, Any]] = getattr(importlib.import_module(module), name)
        answer = function(request)
    except (SupervisorError, OSError, ValueError) as error:
        answer = {"error": " ".join(str(error).split())}
    except MemoryError:
        answer = {"error": "not enough memory: end other programs on this host"}
    except Exception as error:
        answer = {"error": "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]}
    print(json.dumps(answer), flush=True)
    # Threads and libraries that are still busy must not delay the answer.
    os._exit(1 if "error" in answer else 0)
