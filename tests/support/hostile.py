"""Hostile strings: text that has broken parsers, templates, shells, terminals or files. For suites and fuzzers."""

from __future__ import annotations

# Every character at which str.splitlines ends a line, and NUL, at which C ends a string.
LINE_BREAKS: list[str] = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0"]

TERMINAL_STRINGS: list[str] = [
    "\x1b[2J\x1b[H\x1b[31mfailed",  # clears the screen
    "\x1b]52;c;cm0gLXJmIH4=\x07",  # writes to the clipboard
    "\x1b]0;title\x07",
    "\x1b]8;;http://example.com\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31mred",  # CSI as one C1 character
    "ok\rerror: everything is lost",
    "abc\b\b\bxyz",
    "\x07\x0e\x7f",
    "user\u202egpj.exe",
    "\u202aleft\u202bright\u202cpop\u202d",
    "\u2066isolate\u2067\u2068\u2069",
    "zero\u200bwidth\u200d\ufeff",
    "e" + "\u0301" * 200,
    "tag\U000e0041\U000e0042",
]

SYNTAX_STRINGS: list[str] = [
    # YAML and JSON
    "",
    " ",
    "~",
    "null",
    "yes",
    "- a",
    "a: b",
    "key: [unclosed",
    "&a [*a]",
    "*unknown",
    "!!python/object/apply:os.system ['id']",
    "!unsafe '{{ 1 }}'",
    "!vault |",
    "%YAML 9.9",
    "---\n...\n---",
    '{"a": 1',
    '"]}\n{"error": "x"}',
    "2024-99-99",
    "<<: {}",
    # Jinja and format strings
    "{{ 7 * 7 }}",
    "{{ lookup('pipe', 'id') }}",
    "{% for x in y %}",
    "{# comment",
    "{%- raw -%}",
    "#}",
    "{0.__class__}",
    "%(name)s %s %n %d",
    # shells
    "$(id)",
    "`id`",
    "; id",
    "&& id",
    "| id",
    "a b\tc",
    "$HOME",
    "${IFS}",
    "'",
    '"',
    "\\",
    "'\\''",
    "\\\n",
    "*",
    "?",
    "[a-z]",
    "!!",
    "#",
    "<(id)",
    "--help",
    "-oProxyCommand=id",
    "-",
    "--",
    "=",
    "a=b=c",
    # systemd, INI, sshd_config, known_hosts, ufw
    "\nExecStartPre=/usr/bin/id",
    "a\n[Service]\nUser=root",
    "%h/%n/%%/%i",
    "value\\\ncontinued",
    'a" "b',
    "a\nPermitRootLogin yes",
    "@cert-authority * ssh-ed25519 AAAA",
    "host ssh-ed25519 AAAAC3NzaC1lZDI1NTE5\nother ssh-rsa AAAA",
    "|1|AAAA|BBBB",
    # names and paths
    "..",
    "../../../../etc/passwd",
    "/etc/passwd",
    "~nosuchuser/x",
    "~root/x",
    ".ssh/authorized_keys",
    "/dev/zero",
    "/proc/self/mem",
    "C:\\Windows",
    "a//b/./c/",
    "x" * 256,
    "d/" * 2100,
    "org/name",
    "CON",
    # addresses
    "::1",
    "fe80::1%eth0;id",
    "[::1]:22",
    "127.0.0.1/33",
    "0x7f.1",
    "300.1.1.1",
    "1.2.3.4\n5.6.7.8",
    "host:99999",
    # numbers
    "0",
    "-0",
    "-1",
    "1e309",
    "1e308",
    "-1e308",
    "5e-324",
    "nan",
    "inf",
    "0x10",
    "0o17",
    "1_000",
    "9" * 30,
    "9" * 5000,
    "1" + "e9" * 3,
    "18446744073709551616",
    "٣",
    "１２",
    "²",
    "½",
    "1,5",
    # Unicode
    "ﬀİıßſ",
    "\u212a",
    "𝔣𝔬𝔬",
    "日本語",
    "🏳️‍🌈",
    "a\u0000b",
    "\ufffe\uffff",
    # sizes
    "A" * 5000,
    "(" * 3000,
    "[" * 3000,
    '{"a":' * 1000,
    "\n" * 1000,
]

HOSTILE_STRINGS: list[str] = [*(f"a{char}b" for char in LINE_BREAKS), *TERMINAL_STRINGS, *SYNTAX_STRINGS]
"""Every hostile string that can be encoded as UTF-8."""

UNENCODABLE_STRINGS: list[str] = ["\ud800", "a\udfffb", "\udc80\udcff"]
"""Lone surrogates: JSON can express them, UTF-8 cannot."""

HOSTILE_BYTES: list[bytes] = [
    b"\xff\xfe\xfd",
    b"\xef\xbb\xbf{}",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\x00" * 64,
    "text".encode("utf-16"),
    b"\x1f\x8b\x08\x00",
    b"PK\x03\x04",
    b"\xe2\x80",
]
"""Bytes that are not UTF-8, or that start like a file of another format."""
