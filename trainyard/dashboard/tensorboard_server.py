"""TensorBoard on a Unix socket, which only the user of the dashboard can open. It ends with its standard input.

    python -m trainyard.dashboard.tensorboard_server SOCKET FOLDER

TensorBoard's own program listens on a TCP port, which every user of the machine reaches without a password.
"""

from __future__ import annotations

import os
import resource
import sys

from tensorboard import program
from werkzeug.serving import BaseWSGIServer

PREFIX = "/tensorboard"  # of its paths
MEMORY = 4 << 30  # bytes of memory: hosts supply the contents of the event files
RELOAD = 5  # s between two checks of the event files


class _SocketServer(program.WerkzeugServer):  # type: ignore[misc]
    def get_url(self) -> str:
        return f"{self._flags.host}{PREFIX}/"  # the original formats a TCP port


def main(socket: str, folder: str) -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.nice(10)
    assert issubclass(_SocketServer, BaseWSGIServer)  # which takes unix://PATH as a host
    board = program.TensorBoard(server_class=_SocketServer)
    # The fast loader would be a process of its own, with a TCP port.
    flags = ["--load_fast=false", f"--reload_interval={RELOAD}", f"--path_prefix={PREFIX}"]
    board.configure(argv=["tensorboard", f"--host=unix://{socket}", "--port=0", f"--logdir={folder}", *flags])
    board.launch()
    sys.stdin.buffer.read()
    os._exit(0)  # it has nothing to save


if __name__ == "__main__":
    main(*sys.argv[1:])
