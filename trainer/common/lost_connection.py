"""A program that answers over a connection ends with it, although it runs for hours without output."""

import os
import select
import signal
import threading


def end_with_connection(output: int = 1) -> None:
    """Kill this process, and its group if it leads one, when nobody reads the descriptor `output` any more. It is a pipe or a socket."""
    hangup = select.poll()
    # POLLERR and POLLHUP are always reported. A copy: the program may give the number to another file before the thread starts.
    hangup.register(os.dup(output), 0)

    def watch() -> None:
        hangup.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="connection").start()
