"""A block with lines for the hosts of a cluster, in a file that other programs and users also edit.

Everything outside of the block stays unchanged. Every line ends with a comment that names its host.
"""

from __future__ import annotations

# These lines are in files on hosts: a change of them would leave the blocks of earlier versions behind.
BEGIN = "# BEGIN trainyard: written by site.yml, taken away by playbooks/reset.yml"
END = "# END trainyard"
MARK = " # trainyard:"
# Records that this module created the file, so that the file is removed with its last line.
CREATED = "# trainyard made this file"


def split_block(text: str) -> tuple[str, list[str], str]:
    """Return the text before the block, the lines inside it, and the text after it."""
    lines = text.splitlines(keepends=True)
    plain = [line.rstrip("\n") for line in lines]
    if BEGIN not in plain:
        return text, [], ""
    first = plain.index(BEGIN)
    # A block without its end marker (an interrupted write) ends at its last line that has a mark.
    last = first
    for number in range(first + 1, len(plain)):
        if plain[number] == END:
            last = number
            break
        if MARK not in plain[number] and plain[number] != CREATED:
            break
        last = number
    inside = [line for line in plain[first + 1 : last + 1] if line != END]
    return "".join(lines[:first]), inside, "".join(lines[last + 1 :])


def block_lines(inside: list[str], lines: dict[str, list[str]], members: list[str], keep_prefix: str = "") -> list[str]:
    """Return the new lines of the block in the order of `members`.

    Hosts without new lines keep those of their current ones that start with `keep_prefix`.
    """
    current: dict[str, list[str]] = {}
    for line in inside:
        head, mark, member = line.rpartition(MARK)
        if mark and head.startswith(keep_prefix):
            current.setdefault(member, []).append(head)
    return [f"{line}{MARK}{member}" for member in members for line in lines.get(member, current.get(member, []))]


def update_text(
    text: str, lines: dict[str, list[str]], members: list[str], new: bool, keep_prefix: str = ""
) -> str | None:
    """Return the new text of a file, or None to remove the file; `new`: whether the file does not exist yet."""
    before, inside, after = split_block(text)
    created = new or CREATED in inside
    block = block_lines(inside, lines, members, keep_prefix)
    if not block:
        return None if created and not (before + after).strip() else before + after
    body = "\n".join([BEGIN, *([CREATED] if created else []), *block, END]) + "\n"
    return before + body + after if inside or BEGIN in text.splitlines() else body + text
