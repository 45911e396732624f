"""Text as UTF-8: names of files and messages, whatever the locale says."""

import io
import sys

from trainer.common.errors import UserError


def require_utf8() -> None:
    """Check that names of files are UTF-8, and let messages escape characters that the terminal cannot show.

    Python uses UTF-8 in the locales C and POSIX, too, unless PYTHONUTF8=0 forbids it. Raises UserError: names of files
    have another encoding, with which a name beyond ASCII would be another one.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise UserError(f"locale: names of files are {encoding}, not UTF-8: set PYTHONUTF8=1, or LC_ALL=C.UTF-8")
