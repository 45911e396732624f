"""Filter that says why site.yml does not configure a host: its distribution is not Debian, Ubuntu or a derivative of them."""

from __future__ import annotations

import re
from typing import Any

FAMILY = {"debian", "ubuntu"}
FIELD = re.compile(r"""^(ID|ID_LIKE|PRETTY_NAME)=(["']?)(.*)\2[ \t\r]*$""", re.MULTILINE)


def distribution_error(os_release: str) -> str:
    """Return one line that names the distribution of a host and what to do, or an empty string if site.yml supports it.

    Args:
        os_release: the text of /etc/os-release (man os-release); empty if there is none.
    """
    from trainer.common.formats import printable

    fields = {name: value for name, _quote, value in FIELD.findall(os_release)}
    identifier = fields.get("ID", "")
    if FAMILY & {identifier, *fields.get("ID_LIKE", "").split()}:
        return ""
    name = printable(fields.get("PRETTY_NAME") or identifier or "a distribution without /etc/os-release", 80)
    return (
        f"site.yml does not support {name}: its roles install packages with apt (firewall: ufw; system: chrony, libtcmalloc-minimal4; on "
        "request nvidia, nfs, ollama, queue): set cluster_managed: false for this host, install the packages of a "
        "node there into a Python environment, and set cluster_python to it (docs/site.md: Other distributions)"
    )


class FilterModule:
    """The filter, by its name in templates."""

    def filters(self) -> dict[str, Any]:
        return {"distribution_error": distribution_error}
