"""Filters that write values into configuration files. The logic is in trainyard/provision/config_syntax.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from trainyard.provision import config_syntax


def _filter(function: Callable[..., str]) -> Callable[..., str]:
    def apply(value: Any, **options: Any) -> str:
        try:
            return function(value, **options)
        except ValueError as error:
            raise AnsibleFilterError(str(error)) from error

    return apply


class FilterModule:
    """Filters that quote values for configuration files, by their names in templates."""

    def filters(self) -> dict[str, Any]:
        names = ("systemd_quote", "config_line", "exports_path", "config_word", "config_string")
        return {name: _filter(getattr(config_syntax, name)) for name in names}
