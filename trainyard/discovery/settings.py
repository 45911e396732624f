"""The options of a scan."""

from dataclasses import dataclass


class SettingsError(ValueError):
    """A setting is invalid; the message is one line and describes valid values."""


@dataclass(frozen=True)
class Settings:
    """The options of one scan. Times are in seconds. The documentation of the inventory plugin describes each field.

    Raises SettingsError: a number is out of its range.
    """

    networks: tuple[str, ...] = ("auto",)
    hosts: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    ports: tuple[int, ...] = (11434,)
    this_machine: bool = True
    ipv6_neighbours: bool = False
    connect_timeout: float = 0.3
    answer_timeout: float = 2.0
    passes: int = 1
    second_timeout: float = 1.0
    concurrency: int = 256
    max_addresses: int = 4096
    verify: bool = True
    ssh_port: int = 22

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "answer_timeout", "second_timeout"):
            _within(name, getattr(self, name), 0.01, 60)
        _within("passes", self.passes, 1, 2)
        _within("concurrency", self.concurrency, 1, 4096)
        _within("max_addresses", self.max_addresses, 1, 1 << 20)
        _within("ssh_port", self.ssh_port, 1, 65535)
        if not self.ports:
            raise SettingsError("ports: the list is empty; add at least one port, Ollama's default is 11434")
        for port in self.ports:
            _within("ports", port, 1, 65535)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float):
        raise SettingsError(f"{name}: got {value!r}, expected a number from {low} to {high}")
    if not low <= value <= high:
        raise SettingsError(f"{name}: got {value}, expected {low} to {high}")
