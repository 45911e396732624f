"""Items that pages have shown recently, and that are updated as they grow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from trainyard.dashboard.state import Cluster
from trainyard.dashboard.streams import HostStream

KEPT = 32  # items that stay in memory


class Readable(Protocol):
    """An item that reads new data from the hosts."""

    async def update(self, cluster: Cluster, streams: Mapping[str, HostStream]) -> None:
        """Read what is new."""
        ...


Key = TypeVar("Key")
Item = TypeVar("Item", bound=Readable)


class ShownLast(Generic[Key, Item]):
    """The items that were shown last. All browsers that show the same one share it."""

    def __init__(self, make: Callable[[Key], Item], cluster: Cluster, streams: Mapping[str, HostStream]) -> None:
        """Take the function that makes an item of its key."""
        self._make, self._cluster, self._streams = make, cluster, streams
        self._items: OrderedDict[Key, Item] = OrderedDict()

    async def read(self, key: Key) -> Item:
        """Return an item with its new data."""
        item = self._items.get(key) or self._items.setdefault(key, self._make(key))
        self._items.move_to_end(key)
        while len(self._items) > KEPT:
            self._items.popitem(last=False)
        await item.update(self._cluster, self._streams)
        return item
