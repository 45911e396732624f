"""A program that answers over a connection ends with it, although it runs for hours without output."""

import ctypes
import os
import select
import signal
import warnings


def end_with_connection(output: int = 1) -> None:
    """Kill this process when nobody reads the descriptor `output` any more, a pipe or a socket, whatever its threads wait for."""
    program = os.getpid()
    # A process: a thread would wait for the interpreter's lock, which a library can hold for as long as it waits for a file.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12: that other threads are lost, of which the child needs none
        if os.fork():
            return
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with the program
        hangup = select.poll()
        hangup.register(output, 0)  # POLLERR and POLLHUP are always reported
        if os.getppid() == program:
            hangup.poll()
            os.kill(program, signal.SIGKILL)
    finally:
        os._exit(0)
