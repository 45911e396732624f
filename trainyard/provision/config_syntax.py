"""Values in configuration files that roles render: text never becomes another word, directive or line.

A value that a file cannot express is a ValueError of one line; Ansible reports it and writes nothing.
"""

from __future__ import annotations

import re
import string
from typing import Any

from trainer.common.formats import quoted

_UNSAFE_IN_WORD = re.compile(r"[^\w.:/@%+=,~!\\\[\]-]")


def systemd_quote(value: Any, command: bool = False) -> str:
    """Return text as one quoted word of a systemd setting, such as an assignment in `Environment=` (systemd.syntax(7)).

    `value`: the text. `command`: the setting is a command line, where `$` starts a variable. Raises ValueError: the
    text contains NUL, or is not Unicode.
    """
    text = _unicode(value)
    if "\0" in text:
        raise ValueError(f"{quoted(text)} contains NUL, which no systemd unit can express: remove it")
    escapes = {"\\": "\\\\", '"': '\\"', "%": "%%"} | ({"$": "$$"} if command else {})
    return '"' + "".join(escapes.get(c) or (f"\\u{ord(c):04x}" if _is_control(c) else c) for c in text) + '"'


def config_line(value: Any) -> str:
    """Return text as the entire value of a setting without quoting, such as `Where=` of systemd or `path` of rsyncd.conf(5).

    Both formats expand the character %, which is doubled. Raises ValueError: the text has a control character, white
    space at an end, or ends with a backslash.
    """
    text = _unicode(value)
    if any(_is_control(c) for c in text) or text != text.strip() or text.endswith("\\"):
        remedy = "remove control characters, white space at the ends, and a backslash at the end"
        raise ValueError(f"{quoted(text)} cannot be a value in a configuration file: {remedy}")
    return text.replace("%", "%%")


def exports_path(value: Any) -> str:
    """Return a path as exports(5) writes it: in quotes, and special characters as a backslash and three octal digits."""
    plain = set(string.ascii_letters + string.digits + "/._-+@:,= ")
    encoded = _unicode(value).encode()
    return '"' + "".join(chr(b) if chr(b) in plain else f"\\{b:03o}" for b in encoded) + '"'


def config_word(value: Any) -> str:
    """Return text that is one word in any configuration file: a name, an address, a number or a path without spaces.

    Raises ValueError: the text is empty, or has white space, quotes or other special characters.
    """
    text = _unicode(value)
    if not text or _UNSAFE_IN_WORD.search(text) or text.endswith("\\"):
        remedy = "use letters, digits and . _ - : / @ only, without spaces"
        raise ValueError(f"{quoted(text)} is not a word of a configuration file: {remedy}")
    return text


def config_string(value: Any) -> str:
    """Return text in double quotes, for formats without escapes in quotes, such as ssh_config(5).

    Raises ValueError: the text has a control character or a quote, or ends with a backslash.
    """
    text = _unicode(value)
    if any(_is_control(c) or c == '"' for c in text) or text.endswith("\\"):
        remedy = "remove control characters, quotes, and a backslash at the end"
        raise ValueError(f"{quoted(text)} cannot be written to a configuration file: {remedy}")
    return f'"{text}"'


def _unicode(value: Any) -> str:
    text = str(value)
    if any(_is_noncharacter(ord(c)) for c in text):
        raise ValueError(f"{quoted(text)} is not Unicode text: remove the invalid characters")
    return text


def _is_noncharacter(code: int) -> bool:
    """Return whether systemd rejects a code point: half of a surrogate pair, or reserved (Unicode, section 23.7)."""
    return 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f" or character in "\u2028\u2029"
