"""One host's part of a run: start it in the background, report its status, stop it. Standard library only.

    python -m trainer.supervise start|status|stop|list      the request is JSON on standard input
    python -m trainer.supervise run REQUEST                 the supervisor itself, started by `start`

Each prints one JSON object on one line. A request that cannot be carried out prints `{"error": "one line"}` and has exit
code 1. `start` returns as soon as the supervisor runs, which is the main process of a transient systemd unit, or a detached
process where systemd does not run. docs/internals/run-folder.md describes the files of a run folder.

The kernel, not a pid file, determines whether a run is alive: the supervisor holds a lock that ends with its process.
Processes are identified by their parents and by a variable in their environment, never by their name. Signals are sent
through a pidfd, so that they never reach another process with a reused pid.

This file contains no code, because a status request imports the package twice a second.
"""
